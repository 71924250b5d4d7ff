"""Quantises ("rounds") the inputs of quantised linears, in the kernel that computes the inputs if possible.

Such kernels compute an RMSNorm, a residual sum and its norm, or silu(gate) * up. Other inputs are rounded by a kernel
of their own. A program handles one row, that of a token.

Why: with torch's ops, the formula of rounding.py is five kernels and as many passes over the inputs. A kernel that has
the row in registers only adds the computation of scales, and saves a write and a read of 16-bit values.

Scales are stored transposed, [C, T]: C scales per token. Each row of scales is padded to whole tiles of tokens, so that
kernels load scales without a mask. Scales that are nodes of the FX graph are padded to the largest tile size. Scales
that only pass from one kernel of an op to the next are padded to the tile size for the current number of tokens: with
few tokens, several rows of scales then fit into one cache line.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.framework.rounding import SMALLEST_MAXIMUM
from compiled_engine.passes.framework.rounding import round_inputs as rounded_by_torch
from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.norm import residual_rms_norm, rms_norm
from compiled_engine.quantisation import Rounding

# Most columns of a row in a program.
MOST_COLUMNS = 1 << 16
# Beyond FEW_TOKENS, a program without norms processes its row in parts of LEAST_PART to PART_COLUMNS columns.
FEW_TOKENS, PART_COLUMNS, LEAST_PART = 1024, 4096, 1024
# Tokens of the products' smallest and largest tiles.
LEAST_TILE, MOST_TILE = 8, 128
# The first compute capability whose tensor cores multiply codes, by element format.
CAPABILITIES = {"e4m3": (8, 9), "int8": (8, 0)}
# Adding 1.5 * 2^23 to a float32 of a smaller magnitude leaves no fraction: it rounds to the nearest, ties to even.
_WITHOUT_FRACTION = tl.constexpr(12582912.0)

# Cached, as asking costs the host more than a lookup.
capability_of = cache(torch.cuda.get_device_capability)
rounding_of = cache(Rounding.parse)


@triton.jit
def rounded(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return the codes of values x: x / scale, clamped and rounded to `dtype`.

    Int8 codes are clamped to [-128, LARGEST], others to [-LARGEST, LARGEST]. scale: a scalar, or one scale per value.
    """
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    LEAST: tl.constexpr = -128.0 if dtype == tl.int8 else -LARGEST
    clamped = tl.clamp(scaled, LEAST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        clamped = (clamped + _WITHOUT_FRACTION) - _WITHOUT_FRACTION
    return clamped.to(dtype)


@triton.jit
def magnitude(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return |x|, from which the scale of codes in `dtype` is computed.

    For integer codes, which cannot represent NaN, NaN becomes infinity: the scale is then infinite, and the linear's
    results are NaN.
    """
    if dtype == tl.int8:
        return tl.where(tl.abs(x) <= float("inf"), tl.abs(x), float("inf"))
    else:
        return tl.abs(x)


@triton.jit
def scale_of(largest: tl.tensor, LARGEST: tl.constexpr, SMALLEST: tl.constexpr) -> tl.tensor:
    """Return max(largest, SMALLEST) / LARGEST, the scale of values whose largest magnitude is `largest`."""
    largest = tl.maximum(largest, SMALLEST)
    return tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit
def store_rounded(
    x_K: tl.tensor,
    static_ptr: tl.tensor,
    row_scale: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    token: tl.tensor,
    scale_stride: tl.tensor,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    """Write the codes of some columns of a row, and, unless row_scale is given, the scales of these columns' groups.

    x_K: the values, in fp32, of GROUPS * COLUMNS columns (a power of two) from column FIRST on. Columns from K on are
        not written. COLUMNS: columns of a group, which share a scale.
    codes_ptr: [T, K]; scales_ptr: float32 [K / COLUMNS, scale_stride]; token: index of the row.
    static_ptr: the scale of all groups, float32 [1], or None. row_scale: the scale of the whole row, which is already
        stored, or None. With neither, a group's scale is computed from its largest magnitude.
    """
    offset_K = tl.arange(0, GROUPS * COLUMNS)
    column_K = FIRST + offset_K
    x_GC = tl.reshape(x_K, [GROUPS, COLUMNS])
    offset_G = tl.arange(0, GROUPS)
    if row_scale is not None:
        scale_G = row_scale + tl.zeros([GROUPS], tl.float32)
    elif static_ptr is not None:
        scale_G = tl.load(static_ptr + tl.zeros_like(offset_G))
    else:
        scale_G = scale_of(tl.max(magnitude(x_GC, codes_ptr.dtype.element_ty), 1), LARGEST, SMALLEST)
    codes_GC = rounded(x_GC, scale_G[:, None], LARGEST, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + token * K + column_K, tl.reshape(codes_GC, [GROUPS * COLUMNS]), mask=column_K < K)
    if row_scale is None:
        group_G = FIRST // COLUMNS + offset_G
        tl.store(scales_ptr + group_G.to(tl.int64) * scale_stride + token, scale_G, mask=group_G * COLUMNS < K)


@quick_launches
@triton.jit(do_not_specialize=["x_stride", "residual_stride", "eps", "scale_stride"])
def round_inputs_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    inner_weight_ptr: tl.tensor,
    static_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    scale_stride: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute the input of a linear and quantise it. Program (token) writes the codes and scales of one row.

    The row is x, or activation(gate) * up. Optional steps follow, in this order: an RMSNorm with inner_weight, the
    addition of the residual, an RMSNorm with norm_weight. Intermediate results are rounded as by separate kernels.

    x_ptr: [T, K], rows x_stride apart; if ACTIVATION is not "", [T, 2 K], gate and up of each row.
    residual_ptr: [T, K], rows residual_stride apart, or None; sum_ptr: [T, K], for x plus the residual.
    norm_weight_ptr, inner_weight_ptr: [K] or None. OFFSET, WIDE: see rms_norm.
    static_ptr, codes_ptr, scales_ptr, COLUMNS, GROUPS, LARGEST, SMALLEST: see store_rounded.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    column_K = tl.arange(0, GROUPS * COLUMNS)
    mask_K = column_K < K
    if norm_weight_ptr is not None:
        norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if inner_weight_ptr is not None:
        inner_weight_K = tl.load(inner_weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    x_K = tl.load(x_ptr + token * x_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up_K = tl.load(x_ptr + token * x_stride + K + column_K, mask=mask_K, other=0.0).to(tl.float32)
        x_K = silu_mul.gated(x_K, up_K, ACTIVATION, dtype).to(dtype).to(tl.float32)
    if inner_weight_ptr is not None:
        x_K = rms_norm.normed(x_K, inner_weight_K, eps, K, OFFSET, WIDE, dtype).to(tl.float32)
    if residual_ptr is not None:
        residual_K = tl.load(residual_ptr + token * residual_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
        total_K = (x_K + residual_K).to(dtype)
        tl.store(sum_ptr + token * K + column_K, total_K, mask=mask_K)
        x_K = total_K.to(tl.float32)
    if norm_weight_ptr is not None:
        x_K = rms_norm.normed(x_K, norm_weight_K, eps, K, OFFSET, WIDE, dtype).to(tl.float32)
    store_rounded(
        x_K, static_ptr, None, codes_ptr, scales_ptr, token, scale_stride, 0, K, COLUMNS, GROUPS, LARGEST, SMALLEST
    )


@triton.jit
def _part_of_row(
    x_ptr: tl.tensor, FIRST: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Return PART columns of x, or of activation(gate) * up, from column FIRST on, in fp32; zeros from column K on.

    x_ptr: the row. ACTIVATION: "" for x.
    """
    column_P = FIRST + tl.arange(0, PART)
    x_P = tl.load(x_ptr + column_P, mask=column_P < K, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        up_P = tl.load(x_ptr + K + column_P, mask=column_P < K, other=0.0).to(tl.float32)
        x_P = silu_mul.gated(x_P, up_P, ACTIVATION, dtype).to(dtype).to(tl.float32)
    return x_P


@quick_launches
@triton.jit(do_not_specialize=["x_stride", "scale_stride"])
def round_parts_kernel(
    x_ptr: tl.tensor,
    static_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Quantise rows as round_inputs_kernel does, without norms, in parts of GROUPS * COLUMNS columns. Program (token).

    A program that handles one part at a time needs fewer registers, so more programs run at once. WHOLE: the row has
    one scale. Unless this scale is static, the program reads the row twice: to compute the scale, and to round.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    PART: tl.constexpr = GROUPS * COLUMNS
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    row_scale = None
    if static_ptr is not None:
        row_scale = tl.load(static_ptr)
        tl.store(scales_ptr + token, row_scale)
    elif WHOLE:
        largest_P = tl.zeros([PART], tl.float32)
        for first in tl.static_range(0, K, PART):
            x_P = _part_of_row(x_ptr, first, K, PART, ACTIVATION)
            largest_P = tl.maximum(largest_P, magnitude(x_P, codes_ptr.dtype.element_ty))
        row_scale = scale_of(tl.max(largest_P, 0), LARGEST, SMALLEST)
        tl.store(scales_ptr + token, row_scale)
    for first in tl.static_range(0, K, PART):
        x_P = _part_of_row(x_ptr, first, K, PART, ACTIVATION)
        store_rounded(
            x_P,
            None,
            row_scale,
            codes_ptr,
            scales_ptr,
            token,
            scale_stride,
            first,
            K,
            COLUMNS,
            GROUPS,
            LARGEST,
            SMALLEST,
        )


def columns_obstacle(k: int, rounding: Rounding) -> str | None:
    """Return why the kernels that round inputs cannot round rows of `k` columns; None if they can."""
    columns = 0 if rounding.static else rounding.columns
    if columns & (columns - 1):
        return f"inputs are rounded in {columns} columns, no power of two"
    return f"{k} columns are more than {MOST_COLUMNS}" if k > MOST_COLUMNS else None


class Results(NamedTuple):
    """Buffers for the codes and scales of rounded inputs, and the constexprs of the kernels that fill them."""

    codes_TK: torch.Tensor
    scales_CT: torch.Tensor
    constants: dict[str, Any]


def results_for(num_tokens: int, k: int, rounding: Rounding, device: torch.device, tile: int = MOST_TILE) -> Results:
    """Return new tensors for the codes and the scales of inputs [num_tokens, k]. tile: see empty_scales."""
    codes_TK = torch.empty((num_tokens, k), dtype=rounding.dtype, device=device)
    return Results(codes_TK, empty_scales(codes_TK, rounding, tile), dict(_constants(k, rounding)))


@cache
def _constants(k: int, rounding: Rounding) -> dict[str, Any]:
    block = next_power_of_2(k)
    columns = block if rounding.static else min(rounding.columns or block, block)
    return {
        "K": k,
        "COLUMNS": columns,
        "GROUPS": block // columns,
        "LARGEST": rounding.largest,
        "SMALLEST": SMALLEST_MAXIMUM,
        "num_warps": _warps(block),
    }


def _warps(columns: int) -> int:
    return max(1, min(16, columns // 256))


@cache
def _constants_of_parts(k: int, rounding: Rounding) -> dict[str, Any]:
    """Return the constexprs of round_parts_kernel for rows of `k` columns.

    The size of a part divides k, unless it would then be less than LEAST_PART.
    """
    part = min(PART_COLUMNS, k & -k, next_power_of_2(k) // 2)
    if part < LEAST_PART:
        part = min(PART_COLUMNS // 2, next_power_of_2(k))
    whole = rounding.static or not rounding.columns
    columns = part if whole else min(rounding.columns, next_power_of_2(k))
    part = max(part, columns)
    of_parts = {"COLUMNS": columns, "GROUPS": part // columns, "WHOLE": whole, "num_warps": _warps(part)}
    return _constants(k, rounding) | of_parts


def tile_of(num_tokens: int) -> int:
    """Return the number of tokens per tile in linears of `num_tokens` tokens."""
    return min(MOST_TILE, max(LEAST_TILE, next_power_of_2(num_tokens)))


def empty_scales(codes_TK: torch.Tensor, rounding: Rounding, tile: int = MOST_TILE) -> torch.Tensor:
    """Return a new tensor for the scales of codes, float32 [C, T], with C scales for each row of codes.

    Each row of scales has room for whole tiles of `tile` tokens, since kernels read whole tiles.
    """
    num_tokens, k = codes_TK.shape
    columns = 0 if rounding.static else rounding.columns
    room = (num_tokens + tile - 1) // tile * tile
    rows = cdiv(k, columns) if columns else 1
    whole = torch.empty((rows, room), dtype=torch.float32, device=codes_TK.device)
    if isinstance(num_tokens, int) and room == num_tokens:
        return whole
    return whole.as_strided((rows, num_tokens), (room, 1))  # torch 2.11 cannot trace the size of a slice


def why_not_by_kernel(k: int, rounding: Rounding, device: torch.device) -> str | None:
    """Return why no kernel can round rows of `k` columns on a GPU, so that torch's ops do; None if one can."""
    missing = None if device.type != "cuda" else why_no_products(capability_of(device), rounding)
    return columns_obstacle(k, rounding) if missing is None else missing


def why_no_products(capability: tuple[int, int], rounding: Rounding) -> str | None:
    """Return why a GPU's tensor cores cannot multiply codes of this format; None if they can."""
    if capability >= CAPABILITIES[rounding.element]:
        return None
    return f"the GPU's compute capability {capability[0]}.{capability[1]} has no products of {rounding.element}"


def launch(
    x_TK: torch.Tensor,
    rounding: Rounding,
    static_1: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    activation: str = "",
    tile: int = MOST_TILE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x, RMSNorm(x) * norm_weight if this weight is given, or activation(gate) * up if an activation is given.

    gate and up are the halves of x. Returns codes [T, K] and scales [C, T]. They equal those of rounding.round_inputs,
    except that a static scale is repeated for each token. static_1: float32 [1], or None for scales that follow from
    the values. tile: see empty_scales.
    """
    codes_TK, scales_CT, _ = _launch(
        x_TK, None, norm_weight_K, None, static_1, rounding, eps, norm_offset, norm_wide, activation, tile
    )
    return codes_TK, scales_CT


def _launch(
    x_TK: torch.Tensor,
    residual_TK: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    inner_weight_K: torch.Tensor | None,
    static_1: torch.Tensor | None,
    rounding: Rounding,
    eps: float,
    offset: float,
    wide: bool,
    activation: str = "",
    tile: int = MOST_TILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if residual_TK is not None and residual_TK.stride(1) != 1:
        residual_TK = residual_TK.contiguous()
    num_tokens, k = x_TK.shape
    codes_TK, scales_CT, constants = results_for(num_tokens, k // 2 if activation else k, rounding, x_TK.device, tile)
    if num_tokens > FEW_TOKENS and norm_weight_K is None:
        round_parts_kernel[(num_tokens,)](
            x_TK,
            static_1,
            codes_TK,
            scales_CT,
            x_TK.stride(0),
            scales_CT.stride(0),
            **_constants_of_parts(codes_TK.shape[1], rounding),
            ACTIVATION=activation,
            **dependent_launch(x_TK.device),
        )
        return codes_TK, scales_CT, None
    total_TK = None if residual_TK is None else torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    round_inputs_kernel[(num_tokens,)](
        x_TK,
        residual_TK,
        norm_weight_K,
        inner_weight_K,
        static_1,
        codes_TK,
        scales_CT,
        total_TK,
        x_TK.stride(0),
        0 if residual_TK is None else residual_TK.stride(0),
        eps,
        scales_CT.stride(0),
        **constants,
        OFFSET=offset,
        WIDE=wide,
        ACTIVATION=activation,
        **dependent_launch(x_TK.device),
    )
    return codes_TK, scales_CT, total_TK


def by_formula(
    x_TK: torch.Tensor, rounding: Rounding, static_1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [T, K] and scales [C, T] of x, computed with torch's ops. Codes are contiguous."""
    codes_TK, scales_TC = rounded_by_torch(x_TK.contiguous(), rounding, static_1)
    return codes_TK, empty_scales(codes_TK, rounding).copy_(scales_TC.t())


def reference(
    x_TK: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the inputs of a linear as `launch` does, but with torch's ops. Returns codes [T, K] and scales [C, T].

    rounding: the text form of a Rounding. See `launch` for the other arguments.
    """
    if activation:
        x_TK = silu_mul.reference(x_TK, activation)
    if norm_weight_K is not None:
        x_TK = rms_norm.reference(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
    return by_formula(x_TK, rounding_of(rounding), static_1)


def _round_inputs(
    x_TK: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    parsed, norm = rounding_of(rounding), (norm_weight_K, eps, norm_offset, norm_wide)
    columns = x_TK.shape[1] // 2 if activation else x_TK.shape[1]
    if why_not_by_kernel(columns, parsed, x_TK.device) is not None:
        return reference(x_TK, static_1, rounding, *norm, activation)
    return launch(x_TK, parsed, static_1, *norm, activation)


def fake_codes(x_TK: torch.Tensor, rounding: str, halves: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised codes and scales of x, for tracing. halves: the codes have half as many columns as x."""
    num_tokens, k = x_TK.shape
    parsed = rounding_of(rounding)
    codes_TK = x_TK.new_empty((num_tokens, k // 2 if halves else k), dtype=parsed.dtype)
    return codes_TK, empty_scales(codes_TK, parsed)


round_inputs = define_op(
    "round_inputs(Tensor x_TK, Tensor? static_1, str rounding, Tensor? norm_weight_K=None, float eps=0.0, "
    'float norm_offset=0.0, bool norm_wide=False, str activation="") -> (Tensor, Tensor)',
    cpu=reference,
    cuda=_round_inputs,
    fake=lambda x_TK, rounding, activation: fake_codes(x_TK, rounding, bool(activation)),
)


def sum_reference(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x + residual as codes [T, D] and scales [C, T], and x + residual.

    static_1, rounding: see `reference`. For the other arguments see residual_rms_norm.reference.
    """
    how = eps, offset, wide, inner_weight_D
    normed_TD, total_TD = residual_rms_norm.reference(x_TD, residual_TD, weight_D, *how)
    return *by_formula(normed_TD, rounding_of(rounding), static_1), total_TD


def sum_launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x + residual as codes and scales, and x + residual; see `sum_reference`.

    The kernel computes them; if it cannot round to this format, torch's ops do.
    """
    parsed, how = rounding_of(rounding), (eps, offset, wide)
    if why_not_by_kernel(x_TD.shape[1], parsed, x_TD.device) is not None:
        normed_TD, total_TD = residual_rms_norm.launch(x_TD, residual_TD, weight_D, *how, inner_weight_D)
        return *by_formula(normed_TD, parsed, static_1), total_TD
    codes_TD, scales_CT, sum_TD = _launch(x_TD, residual_TD, weight_D, inner_weight_D, static_1, parsed, *how)
    assert sum_TD is not None
    return codes_TD, scales_CT, sum_TD


def fake_sum(x_TD: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uninitialised tensors with the shapes and dtypes of `sum_reference`'s results, for tracing."""
    return *fake_codes(x_TD, rounding), torch.empty_like(x_TD, memory_format=torch.contiguous_format)


residual_rms_norm_rounded = define_op(
    "residual_rms_norm_rounded(Tensor x_TD, Tensor residual_TD, Tensor weight_D, Tensor? static_1, str rounding, "
    "float eps, float offset=0.0, bool wide=False, Tensor? inner_weight_D=None) -> (Tensor, Tensor, Tensor)",
    cpu=sum_reference,
    cuda=sum_launch,
    fake=fake_sum,
)
