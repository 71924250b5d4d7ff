"""Triton kernels for tokens sorted by expert: linears of tiles of one expert's tokens, and the sum of results.

A pair is a token and one of its TOP_K experts. Pair number token * TOP_K + slot has the token's expert number `slot`.
S is the number of pairs; sorted pairs are in the order of experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.experts.experts_gate import gate_of_experts
from compiled_engine.passes.experts.experts_packed import packed_product
from compiled_engine.passes.experts.experts_words import operand_place, words_product
from compiled_engine.passes.linear.small_batch_linear_tiles import weight_rows


@triton.jit
def _product(
    x_ptr_T: tl.tensor,
    w_ptr_N: tl.tensor,
    scales_ptr_N: tl.tensor,
    zeros_ptr_N: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
) -> tl.tensor:
    """Return the matrix product of T rows of x and N rows of a weight, x w^T, fp32 [T, N].

    Arguments ending in _T or _N point to each row's first element. scales_ptr_N: scales of 8-bit weights, one for each
    TILE_COLUMNS columns, or one per row if that is 0; None for other weights. zeros_ptr_N: their zero points, or None.
    ROWS_FIRST: rows of the weight are on the left of the product, otherwise tokens. Tensor cores need 64 rows there.
    """
    TOKENS: tl.constexpr = x_ptr_T.shape[0]
    ROWS: tl.constexpr = w_ptr_N.shape[0]
    CODED: tl.constexpr = scales_ptr_N is not None
    BY_STEP: tl.constexpr = CODED and TILE_COLUMNS > 0
    k_K = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, TOKENS] if ROWS_FIRST else [TOKENS, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        column_K = k + k_K
        if K % BLOCK_K == 0:
            w_NK = tl.load(w_ptr_N[:, None] + column_K[None, :])
            x_TK = tl.load(x_ptr_T[:, None] + column_K[None, :])
        else:
            w_NK = tl.load(w_ptr_N[:, None] + column_K[None, :], mask=(column_K < K)[None, :], other=0.0)
            x_TK = tl.load(x_ptr_T[:, None] + column_K[None, :], mask=(column_K < K)[None, :], other=0.0)
        if CODED:
            if zeros_ptr_N is not None:  # of 8 bits as the codes, so that differences are exact in bfloat16
                zero_N = tl.load(zeros_ptr_N + (k // TILE_COLUMNS if TILE_COLUMNS > 0 else 0))
                w_NK = w_NK.to(tl.float32) - zero_N.to(tl.float32)[:, None]
            w_NK = w_NK.to(x_TK.dtype)
        left, right = (w_NK, x_TK) if ROWS_FIRST else (x_TK, w_NK)
        if BY_STEP:
            scale_N = tl.load(scales_ptr_N + k // TILE_COLUMNS)
            product = tl.dot(left, tl.trans(right), input_precision="ieee")
            acc += product * (scale_N[:, None] if ROWS_FIRST else scale_N[None, :])
        else:
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    y_TN = tl.trans(acc) if ROWS_FIRST else acc
    if CODED and not BY_STEP:
        y_TN *= tl.load(scales_ptr_N)[None, :]
    return y_TN


@quick_launches
@triton.jit
def grouped_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    IN_WORDS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute one of the experts' two linears: program (rows, block) takes ROWS weight rows and a block of pairs.

    x_ptr: [T, K] with GATED, otherwise [S, K] by sorted pair; rows x_stride apart. w_ptr: [E, NUM_ROWS, K]; bias_ptr:
        [E, NUM_ROWS] or None.
    out_ptr: with GATED, [S, NUM_ROWS / 2] by sorted pair, the results of the gate; otherwise [S, NUM_ROWS] by pair, the
        results times the pairs' weights.
    sorted_ptr: int32 [S], the sorted pairs; blocks_ptr: int32 [blocks, 4], see place_kernel; weights_ptr: float32 [S],
        by pair.
    scales_ptr: scales of codes, one per TILE_ROWS rows and TILE_COLUMNS columns (a multiple of BLOCK_K, or 0 for whole
        rows); None for other weights.
    zeros_ptr: uint8, zero points of codes, in the shape of the scales; None for none.
    PACKED, SCALES, ZERO, UNIT: of codes of four bits, see packed_product; TILE_ROWS is then 1.
    row_scales_ptr: float32 [E, NUM_ROWS], factors of the rows' products; None for none.
    IN_WORDS: multiply by words_product, for which rows of x, and with GATED of the results, are in the order of
        operand_place for UNIT, padded with zeros.
    ROWS_FIRST: see _product. ACTIVATION, ALPHA, LIMIT, INTERLEAVED: see Gate. TOKENS: the most pairs of a block.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(blocks_ptr + 4 * tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(blocks_ptr + 4 * tl.program_id(1) + 1)
    count = tl.load(blocks_ptr + 4 * tl.program_id(1) + 2)
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    NUM_OUTPUTS: tl.constexpr = NUM_ROWS // 2 if GATED else NUM_ROWS
    # Past the end the last token repeats.
    place_T = first + tl.minimum(tl.arange(0, TOKENS), count - 1)
    mask_T = tl.arange(0, TOKENS) < count
    pair_T = tl.load(sorted_ptr + place_T)
    x_row_T = pair_T // TOP_K if GATED else place_T
    x_row_ptr_T = x_ptr + x_row_T.to(tl.int64) * x_stride
    if GATED and INTERLEAVED:
        row_N = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), NUM_ROWS - 1)
    else:
        row_N = weight_rows(tl.program_id(0) * OUTPUTS, NUM_OUTPUTS, ROWS, GATED)
    CODED: tl.constexpr = scales_ptr is not None
    if CODED:
        BLOCKS: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS if TILE_COLUMNS > 0 else 1
        scale_row_N = expert * ((NUM_ROWS + TILE_ROWS - 1) // TILE_ROWS) + row_N // TILE_ROWS
        scale_ptr_N = scales_ptr + scale_row_N * BLOCKS
    else:
        scale_ptr_N = None
    zero_ptr_N = None if zeros_ptr is None else zeros_ptr + scale_row_N * BLOCKS
    if IN_WORDS:
        of_expert_ptr = w_ptr + expert * (NUM_ROWS * (K // 2))
        of_scales_ptr = scales_ptr + expert * (NUM_ROWS * (K // UNIT))
        y_TN = words_product(x_row_ptr_T, of_expert_ptr, of_scales_ptr, row_N, K, SCALES, UNIT, BLOCK_K, NUM_STAGES)
    elif PACKED != "":
        y_TN = packed_product(
            x_row_ptr_T,
            w_ptr + (expert * NUM_ROWS + row_N) * (K // 2),
            scale_ptr_N,
            zero_ptr_N,
            K,
            TILE_COLUMNS,
            PACKED,
            SCALES,
            ZERO,
            UNIT,
            BLOCK_K,
            NUM_STAGES,
        )
    else:
        w_row_ptr_N = w_ptr + (expert * NUM_ROWS + row_N) * K
        y_TN = _product(
            x_row_ptr_T,
            w_row_ptr_N,
            scale_ptr_N,
            zero_ptr_N,
            K,
            TILE_COLUMNS,
            BLOCK_K,
            NUM_STAGES,
            ROWS_FIRST,
        )
    if row_scales_ptr is not None:
        y_TN *= tl.load(row_scales_ptr + expert * NUM_ROWS + row_N)[None, :]
    if bias_ptr is not None:
        y_TN += tl.load(bias_ptr + expert * NUM_ROWS + row_N).to(tl.float32)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y_TN = y_TN.to(dtype).to(tl.float32)
    output_M = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    STORED: tl.constexpr = (NUM_OUTPUTS + 127) // 128 * 128 if GATED and IN_WORDS else NUM_OUTPUTS
    mask_TM = mask_T[:, None] & (output_M < STORED)[None, :]
    place_M = output_M
    if GATED:
        gate_TM, up_TM = tl.split(tl.reshape(y_TN, [TOKENS, OUTPUTS, 2]))
        y_TM = gate_of_experts(gate_TM, up_TM, ACTIVATION, ALPHA, LIMIT, dtype)
        out_row_T = place_T
        if IN_WORDS:
            y_TM = tl.where((output_M < NUM_OUTPUTS)[None, :], y_TM, 0.0)
            place_M = operand_place(output_M, UNIT)
    else:
        y_TM = y_TN * tl.load(weights_ptr + pair_T).to(dtype).to(tl.float32)[:, None]
        out_row_T = pair_T
    out_ptrs_TM = out_ptr + out_row_T.to(tl.int64)[:, None] * STORED + place_M[None, :]
    tl.store(out_ptrs_TM, y_TM.to(dtype), mask=mask_TM)


@quick_launches
@triton.jit
def combine_kernel(
    y_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Sum the results of each token's experts and add the residual: program (token, block of columns).

    y_ptr: [T, TOP_K, HIDDEN_SIZE], already multiplied by the pairs' weights; residual_ptr: [T, HIDDEN_SIZE] or None;
        out_ptr: [T, HIDDEN_SIZE].
    counts_ptr: int32 [NUM_EXPERTS], set to zero for the next launch.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        e_E = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + e_E, tl.zeros([BLOCK_E], tl.int32), mask=e_E < NUM_EXPERTS)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_D = column_D < HIDDEN_SIZE
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for x in tl.static_range(TOP_K):
        sum_D += tl.load(y_ptr + (token * TOP_K + x) * HIDDEN_SIZE + column_D, mask=mask_D, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        residual_D = tl.load(residual_ptr + token * HIDDEN_SIZE + column_D, mask=mask_D, other=0.0)
        sum_D = sum_D.to(dtype).to(tl.float32) + residual_D.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN_SIZE + column_D, sum_D.to(dtype), mask=mask_D)
