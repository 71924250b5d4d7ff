"""Decodes the weight of all experts in e2m1 (MXFP4, NVFP4) before a product of many tokens.

A product that decodes the weight itself decodes it anew for each tile of tokens, while its tensor cores wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.experts.experts_packed import POWER, factor_of, halves_of, low_columns

# Rows and bytes of a row that a program decodes.
ROWS, BYTES = 8, 512


@quick_launches
@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Decode codes: program (rows, bytes) decodes BYTES bytes of each of ROWS rows.

    codes_ptr: uint8 [num_rows, K / 2], in the order of rounding.in_halves for UNIT columns. scales_ptr: uint8
    [num_rows, K / TILE_COLUMNS], in the format SCALES. out_ptr: [num_rows, K], values times scales.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS
    IN_BLOCK: tl.constexpr = 2 * BYTES // TILE_COLUMNS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row_N = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask_N1 = (row_N < num_rows)[:, None]
    byte_B = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    mask_NB = mask_N1 & (byte_B < K // 2)[None, :]
    codes_NB = tl.load(codes_ptr + row_N[:, None] * (K // 2) + byte_B[None, :], mask=mask_NB, other=0)
    tile_C = tl.program_id(1) * IN_BLOCK + tl.arange(0, IN_BLOCK)
    scale_ptrs_NC = scales_ptr + row_N[:, None] * TILES + tile_C[None, :]
    scale_NC = tl.load(scale_ptrs_NC, mask=mask_N1 & (tile_C < TILES)[None, :], other=0)
    spread_NCB = tl.broadcast_to(factor_of(scale_NC, SCALES, dtype)[:, :, None], [ROWS, IN_BLOCK, TILE_COLUMNS // 2])
    low_NB, high_NB = halves_of(codes_NB, tl.reshape(spread_NCB, [ROWS, BYTES]), "e2m1", dtype)
    column_B = tl.program_id(1) * (2 * BYTES) + low_columns(BYTES, UNIT)
    out_ptrs_NB = out_ptr + row_N[:, None] * K + column_B[None, :]
    tl.store(out_ptrs_NB, (low_NB.to(tl.float32) * POWER).to(dtype), mask=mask_NB)
    tl.store(out_ptrs_NB + UNIT // 2, (high_NB.to(tl.float32) * POWER).to(dtype), mask=mask_NB)


def decoded_weight(
    codes_ENB: torch.Tensor, scales_ENC: torch.Tensor, tile_columns: int, unit: int, dtype: torch.dtype, scales: str
) -> torch.Tensor:
    """Return the weight of all experts in `dtype`, [E, N, K], without scales of rows.

    Codes and scales must be contiguous, uint8. tile_columns: columns that share a scale, a power of two from 8 on.
    unit: columns of a unit, see rounding.in_halves. scales: their format, see experts_codes.constants_of.
    """
    num_experts, num_rows, num_bytes = codes_ENB.shape
    in_program = max(BYTES, tile_columns // 2)
    out_ENK = torch.empty((num_experts, num_rows, 2 * num_bytes), dtype=dtype, device=codes_ENB.device)
    decode_kernel[(cdiv(num_experts * num_rows, ROWS), cdiv(num_bytes, in_program))](
        codes_ENB,
        scales_ENC,
        out_ENK,
        num_experts * num_rows,
        K=2 * num_bytes,
        TILE_COLUMNS=tile_columns,
        UNIT=unit,
        SCALES=scales,
        ROWS=ROWS,
        BYTES=in_program,
        **dependent_launch(codes_ENB.device),
    )
    return out_ENK
