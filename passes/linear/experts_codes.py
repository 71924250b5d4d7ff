"""Quantised expert weights: codes of 8 or 4 bits with scales, decoded in kernels' registers or by `experts_weight`.

Inputs of experts are not rounded. This is more accurate, and as fast with few tokens: reading the weights dominates.
Codes of four bits are in the order of rounding.in_halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.framework.rounding import decode, dequantise, from_halves, unit_of
from compiled_engine.quantisation import LinearScheme, Rounding

# Columns per scale: a power of two within these bounds, or whole rows.
LEAST_COLUMNS, MOST_COLUMNS = 32, 256
# The lower bound for scales of one byte, which are factors of decoded values: a step of the matrix product may span
# several of these.
LEAST_OF_BYTES = 8
# Least columns of a unit of packed codes: a thread decodes four bytes at once.
LEAST_UNIT = 8
# The first compute capability for each format that kernels decode, and what the GPUs before it lack. Int8 is exact in
# bfloat16.
_CONVERSION, _ARITHMETIC = ((8, 9), "conversion of FP8"), ((8, 0), "arithmetic of bfloat16")
CAPABILITIES = {"e4m3": _CONVERSION} | dict.fromkeys(("int8", "uint8", "int4", "uint4", "mxfp4", "nvfp4"), _ARITHMETIC)
# Formats of scales of one byte, by the dtype in which they are stored.
_SCALES = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}
# Elements of linears -> elements of experts. Linears have one scale in fp32 for both of NVFP4: their groups of 16
# columns are smaller than a step of a matrix product, which takes one-byte scales alone as factors of its values.
_OF_EXPERTS = {"e2m1": "nvfp4"}
# The largest stored scale of mxfp4 that kernels decode, 2^65.
LARGEST_EXPONENT = 192
# Last part of a parameter's name -> the projections whose rows it holds.
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def projections_of(name: str) -> tuple[str, ...]:
    """Return the names of the projections whose rows the expert parameter `name` holds; () for other parameters."""
    return _PROJECTIONS.get(name.rpartition(".")[2], ())


def modules_of(name: str, num_experts: int) -> tuple[str, ...]:
    """Return the names by which quantisation rules know the matrices of the expert parameter `name`."""
    prefix, projections = name.rpartition(".")[0], projections_of(name)
    return tuple(f"{prefix}.{expert}.{projection}" for expert in range(num_experts) for projection in projections)


def of_experts(rounding: Rounding) -> Rounding:
    """Return the rounding in which experts keep codes for which the rules state `rounding`."""
    return rounding._replace(element=_OF_EXPERTS.get(rounding.element, rounding.element))


@triton.jit
def scaled(
    w_NK: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    scale_row_N: tl.tensor,
    mask_N: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return decoded codes, less their zero points, times their scales, in fp32.

    w_NK: fp32, the values of the codes of N rows of a weight with K columns, from column k on.
    scales_ptr: float32, [tiles of rows, tiles of columns]. TILE_COLUMNS: columns that share a scale; 0: all.
    zeros_ptr: uint8, in the shape of the scales; None if no tile has a zero point.
    scale_row_N: for each row its index in the first dimension of the scales; mask_N: whether the row exists.
    """
    ROWS: tl.constexpr = w_NK.shape[0]
    BLOCK_K: tl.constexpr = w_NK.shape[1]
    if TILE_COLUMNS == 0:
        if zeros_ptr is not None:
            w_NK -= tl.load(zeros_ptr + scale_row_N, mask=mask_N, other=0).to(tl.float32)[:, None]
        return w_NK * tl.load(scales_ptr + scale_row_N, mask=mask_N, other=0.0)[:, None]
    else:
        BLOCKS: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS
        block_G = k // TILE_COLUMNS + tl.arange(0, BLOCK_K // TILE_COLUMNS)
        mask_NG = mask_N[:, None] & (block_G < BLOCKS)[None, :]
        scale_NG = tl.load(scales_ptr + scale_row_N[:, None] * BLOCKS + block_G[None, :], mask=mask_NG, other=0.0)
        w_NGC = tl.reshape(w_NK, [ROWS, BLOCK_K // TILE_COLUMNS, TILE_COLUMNS])
        if zeros_ptr is not None:
            zero_ptrs_NG = zeros_ptr + scale_row_N[:, None] * BLOCKS + block_G[None, :]
            w_NGC -= tl.load(zero_ptrs_NG, mask=mask_NG, other=0).to(tl.float32)[:, :, None]
        return tl.reshape(w_NGC * scale_NG[:, :, None], [ROWS, BLOCK_K])


def obstacle(scheme: LinearScheme, num_columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels of experts do not support codes of this scheme in `num_columns` columns; None if they do.

    scheme: with a rounding of `of_experts`. On a CPU, where torch's ops decode the codes, all limits but the GPU's
    capability apply. dtype: the results' dtype.
    """
    rounding = scheme.weight
    columns, is_packed = rounding.columns, rounding.format.per_byte > 1
    in_fp32 = rounding.format.scales == torch.float32
    least = LEAST_COLUMNS if in_fp32 else LEAST_OF_BYTES
    if rounding.element not in CAPABILITIES:
        return f"the kernels of experts do not decode {rounding.element}"
    if scheme.reordered:
        return "the columns of each expert are reordered"
    if columns & (columns - 1) or (columns and not least <= columns <= MOST_COLUMNS):
        return f"tiles of {columns} columns are no power of two from {least} to {MOST_COLUMNS}"
    if is_packed and unit_of(rounding, num_columns) < LEAST_UNIT:
        return f"{num_columns} columns of four bits are no multiple of {LEAST_UNIT}"
    if not in_fp32 and dtype == torch.float16:
        over = "" if rounding.format.scales == torch.uint8 else " over 2^64, as kernels decode them"
        return f"float16 does not hold the scales{over}"
    least_capability, lacks = CAPABILITIES[rounding.element]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < least_capability:
        return f"the GPU has no {lacks}"
    return None


def constants_of(scheme: str, num_columns: int) -> dict[str, Any]:
    """Return the constexprs of kernels that read weights with `num_columns` columns.

    scheme: the text form of a Rounding; "" for weights that are not quantised. PACKED: if codes share a byte, "e2m1" or
    "integers"; otherwise "". SCALES: the format of scales of one byte, "e8m0" or "e4m3"; otherwise "". ZERO: the zero
    point of tiles without one of their own. UNIT: see `unit_of`.
    """
    rounding = Rounding.parse(scheme) if scheme else Rounding("", 1, 0)
    packed, scales, zero, unit = "", "", 0, 0
    if scheme and rounding.format.per_byte > 1:
        packed, scales = "e2m1" if rounding.format.values else "integers", _SCALES.get(rounding.format.scales, "")
        zero, unit = rounding.format.zero or 0, unit_of(rounding, num_columns)
    tiles = {"TILE_ROWS": rounding.rows, "TILE_COLUMNS": rounding.columns}
    return tiles | {"PACKED": packed, "SCALES": scales, "ZERO": zero, "UNIT": unit}


def columns_of(codes: torch.Tensor, scheme: str) -> int:
    """Return the number of columns K of a weight, given its values or codes.

    codes: [..., N, K], or fewer columns if several codes share a byte. scheme: see `constants_of`.
    """
    return codes.shape[-1] * (Rounding.parse(scheme).format.per_byte if scheme else 1)


def decoded(
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    scheme: str,
    row_scales_R1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return an expert's weight, dequantised to fp32 [N, K]. scheme: the text form of a Rounding.

    zeros_RC, row_scales_R1: the zero points of tiles, and the scales of rows; None if the scheme has none.
    """
    rounding = Rounding.parse(scheme)
    if rounding.format.per_byte == 1:
        return decode(codes_NK, scales_RC, rounding, zeros_RC)
    codes_NK = from_halves(codes_NK, unit_of(rounding, columns_of(codes_NK, scheme)))
    values_NK = dequantise(codes_NK, scales_RC, rounding, zeros_RC)
    return values_NK if row_scales_R1 is None else values_NK * row_scales_R1


def _weight(
    codes_ENK: torch.Tensor,
    scales_ERC: torch.Tensor,
    zeros_ERC: torch.Tensor | None,
    scheme: str,
    dtype: str,
    row_scales_ER1: torch.Tensor | None = None,
) -> torch.Tensor:
    zeros, row_scales = ([None] * len(codes_ENK) if each is None else each for each in (zeros_ERC, row_scales_ER1))
    parts = zip(codes_ENK, scales_ERC, zeros, row_scales, strict=True)
    found = [decoded(codes, scales, zero, scheme, of_rows) for codes, scales, zero, of_rows in parts]
    return torch.stack(found).to(getattr(torch, dtype))


def _fake(codes_ENK: torch.Tensor, scheme: str, dtype: str) -> torch.Tensor:
    shape = *codes_ENK.shape[:-1], columns_of(codes_ENK, scheme)
    return codes_ENK.new_empty(shape, dtype=getattr(torch, dtype))


experts_weight = define_op(
    "experts_weight(Tensor codes_ENK, Tensor scales_ERC, Tensor? zeros_ERC, str scheme, str dtype, "
    "Tensor? row_scales_ER1=None) -> Tensor",
    cpu=_weight,
    cuda=_weight,
    fake=_fake,
)
