"""Quantised expert weights: 8-bit codes with scales, decoded in kernels' registers or by the op `experts_weight`.

Inputs of experts are not rounded. This is more accurate, and as fast with few tokens: reading the weights dominates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.framework.rounding import decode
from compiled_engine.quantisation import Rounding

# Columns per scale: a power of two within these bounds, or whole rows.
LEAST_COLUMNS, MOST_COLUMNS = 32, 256
# The first compute capability with conversions of e4m3.
CAPABILITY = (8, 9)
# Last part of a parameter's name -> the projections whose rows it holds.
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def projections_of(name: str) -> tuple[str, ...]:
    """Return the projections whose rows an expert parameter of this name holds; empty for other parameters."""
    return _PROJECTIONS.get(name.rpartition(".")[2], ())


@triton.jit
def scaled(
    w_NK: tl.tensor,
    scales_ptr: tl.tensor,
    scale_row_N: tl.tensor,
    mask_N: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return rows of codes times their scales, in fp32. w_NK: the codes, from column k on, as numbers in fp32.

    scales_ptr: float32, one row per tile of rows, with one scale per TILE_COLUMNS columns (0: per row).
    scale_row_N: the row of scales for each row of codes; mask_N: whether the row exists.
    """
    ROWS: tl.constexpr = w_NK.shape[0]
    BLOCK_K: tl.constexpr = w_NK.shape[1]
    if TILE_COLUMNS == 0:
        return w_NK * tl.load(scales_ptr + scale_row_N, mask=mask_N, other=0.0)[:, None]
    else:
        BLOCKS: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS
        block_G = k // TILE_COLUMNS + tl.arange(0, BLOCK_K // TILE_COLUMNS)
        mask_NG = mask_N[:, None] & (block_G < BLOCKS)[None, :]
        scale_NG = tl.load(scales_ptr + scale_row_N[:, None] * BLOCKS + block_G[None, :], mask=mask_NG, other=0.0)
        w_NGC = tl.reshape(w_NK, [ROWS, BLOCK_K // TILE_COLUMNS, TILE_COLUMNS])
        return tl.reshape(w_NGC * scale_NG[:, :, None], [ROWS, BLOCK_K])


def obstacle(rounding: Rounding, device: torch.device) -> str | None:
    """Return why the kernels do not support these codes, or None. On a CPU, plain torch decodes them."""
    columns = rounding.columns
    if rounding.element != "e4m3":
        return f"the kernels of experts do not decode {rounding.element}"
    if columns & (columns - 1) or (columns and not LEAST_COLUMNS <= columns <= MOST_COLUMNS):
        return f"tiles of {columns} columns are no power of two from {LEAST_COLUMNS} to {MOST_COLUMNS}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the GPU has no conversion of FP8"
    return None


def constants_of(scheme: str) -> dict[str, Any]:
    """Return the constexprs TILE_ROWS and TILE_COLUMNS for a scheme; "" means weights that are not quantised."""
    rounding = Rounding.parse(scheme) if scheme else Rounding("", 1, 0)
    return {"TILE_ROWS": rounding.rows, "TILE_COLUMNS": rounding.columns}


def decoded(codes_ENK: torch.Tensor, scales_ERC: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the weights, fp32 [E, N, K], from their codes and scales. scheme: text that Rounding.parse reads."""
    rounding = Rounding.parse(scheme)
    return torch.stack([decode(*each, rounding) for each in zip(codes_ENK, scales_ERC, strict=True)])


def _weight(codes_ENK: torch.Tensor, scales_ERC: torch.Tensor, scheme: str, dtype: str) -> torch.Tensor:
    return decoded(codes_ENK, scales_ERC, scheme).to(getattr(torch, dtype))


experts_weight = define_op(
    "experts_weight(Tensor codes_ENK, Tensor scales_ERC, str scheme, str dtype) -> Tensor",
    cpu=_weight,
    cuda=_weight,
    fake=lambda codes_ENK, scales_ERC, scheme, dtype: codes_ENK.new_empty(codes_ENK.shape, dtype=getattr(torch, dtype)),
)
