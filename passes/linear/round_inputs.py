"""Kernel that rounds the inputs of quantised linears, a row a program, with the RMSNorm before it where there is one.

Why: in plain torch the formula of rounding.py is five kernels and as many passes over the inputs. The norm has its row
in registers, so codes cost nothing there but their scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.rounding import SMALLEST_MAXIMUM
from compiled_engine.passes.norm.rms_norm import normed
from compiled_engine.quantisation import Rounding

# Columns of a row that a program holds, at most.
MOST_COLUMNS = 1 << 16
# Tokens of the products' tiles: the fewest and the most, powers of two.
LEAST_TILE, MOST_TILE = 8, 128


@triton.jit
def rounded(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The codes of values that share a scale, or that each have one."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@quick_launches
@triton.jit(do_not_specialize=["x_stride", "eps", "scale_stride"])
def round_inputs_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    static_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    scale_stride: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token): the codes of a row, and the scale of each COLUMNS of its columns, or the static one.

    GROUPS * COLUMNS: a power of two, at least K. codes: [T, K]; scales: float32 [groups, scale_stride].
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    column_K = tl.arange(0, GROUPS * COLUMNS)
    mask_K = column_K < K
    if norm_weight_ptr is not None:
        norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    x_K = tl.load(x_ptr + token * x_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        x_K = normed(x_K, norm_weight_K, eps, K, OFFSET, WIDE, dtype).to(tl.float32)
    x_GC = tl.reshape(x_K, [GROUPS, COLUMNS])
    group_G = tl.arange(0, GROUPS)
    if static_ptr is not None:
        scale_G = tl.load(static_ptr + tl.zeros_like(group_G))
    else:
        largest_G = tl.maximum(tl.max(tl.abs(x_GC), 1), SMALLEST)
        scale_G = tl.div_rn(largest_G, tl.full([GROUPS], LARGEST, tl.float32))
    codes_GC = rounded(x_GC, scale_G[:, None], LARGEST, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + token * K + column_K, tl.reshape(codes_GC, [GROUPS * COLUMNS]), mask=mask_K)
    tl.store(scales_ptr + group_G.to(tl.int64) * scale_stride + token, scale_G, mask=group_G * COLUMNS < K)


def columns_obstacle(k: int, rounding: Rounding) -> str | None:
    """Why the kernel does not round inputs of k columns; None where it does."""
    columns = 0 if rounding.static else rounding.columns
    if columns & (columns - 1):
        return f"inputs are rounded in {columns} columns, no power of two"
    return f"{k} columns are more than {MOST_COLUMNS}" if k > MOST_COLUMNS else None


def launch(
    x_TK: torch.Tensor,
    rounding: Rounding,
    static_1: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [T, K] of RMSNorm(x) * norm_weight, or of x without a norm, and their scales, transposed: [C, T].

    They are those of rounding.round_inputs; a static scale is repeated for each token. Rows of scales have room for
    whole tiles of tokens, whose loads need no mask.
    """
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    num_tokens, k = x_TK.shape
    block = next_power_of_2(k)
    columns = block if rounding.static else min(rounding.columns or block, block)
    codes_TK = torch.empty((num_tokens, k), dtype=rounding.dtype, device=x_TK.device)
    tile = min(MOST_TILE, max(LEAST_TILE, next_power_of_2(num_tokens)))
    room = cdiv(num_tokens, tile) * tile
    scales_CT = torch.empty((cdiv(k, columns), room), dtype=torch.float32, device=x_TK.device)
    round_inputs_kernel[(num_tokens,)](
        x_TK,
        norm_weight_K,
        static_1,
        codes_TK,
        scales_CT,
        x_TK.stride(0),
        eps,
        room,
        K=k,
        COLUMNS=columns,
        GROUPS=block // columns,
        LARGEST=rounding.largest,
        SMALLEST=SMALLEST_MAXIMUM,
        OFFSET=norm_offset,
        WIDE=norm_wide,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch(x_TK.device),
    )
    return codes_TK, scales_CT[:, :num_tokens]
