"""Triton kernels for the experts of few tokens: routing, then two matrix-vector products at memory bandwidth.

Each token's experts are read for this token alone. That is the fastest as long as few tokens choose the same expert:
nothing is sorted, and the first product begins as soon as experts are chosen. A pair is a token and one of its experts,
see experts_routing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.experts.experts_gate import gate_of_experts
from compiled_engine.passes.experts.experts_routing import chosen_experts
from compiled_engine.passes.linear.experts_codes import scaled
from compiled_engine.passes.linear.small_batch_linear_gemv import rows_of
from compiled_engine.passes.linear.small_batch_linear_tiles import _ask_into_l2 as ask_into_l2


@quick_launches
@triton.jit(do_not_specialize=["logits_stride"])
def by_token_route_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Choose the experts of each token and their weights. Program: (token), fastest with one warp.

    logits_ptr: [T, NUM_EXPERTS], of the router, rows logits_stride apart. Writes chosen_ptr: int32 [S], and
        weights_ptr: float32 [S], by pair.
    BLOCK_E: NUM_EXPERTS rounded up to a power of two. RENORMALISE: see chosen_experts.
    """
    BLOCK_X: tl.constexpr = triton.next_power_of_2(TOP_K)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * logits_stride
    expert_X, weight_X = chosen_experts(logits_ptr, NUM_EXPERTS, BLOCK_E, TOP_K, BLOCK_X, RENORMALISE)
    x_X = tl.arange(0, BLOCK_X)
    tl.store(chosen_ptr + token * TOP_K + x_X, expert_X, mask=x_X < TOP_K)
    tl.store(weights_ptr + token * TOP_K + x_X, weight_X, mask=x_X < TOP_K)


@quick_launches
@triton.jit(do_not_specialize=["eps"])
def by_token_gate_up_kernel(
    x_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute the first linear of each token's experts and the gate. Program (rows, pair) computes ROWS outputs.

    x_ptr: [T, K], rows x_stride apart; norm_weight_ptr: [K]; gate_up_ptr: [E, 2 * WIDTH, K]; bias_ptr: [E, 2 * WIDTH]
        or None; chosen_ptr: [S], the experts.
    hidden_ptr: [S, WIDTH], the results.
    scales_ptr, zeros_ptr, TILE_ROWS, TILE_COLUMNS: of codes, see grouped_kernel; BLOCK_K is a multiple of TILE_COLUMNS.
    NORM: apply an RMS norm to x first, with OFFSET added to the norm's weight.
    ACTIVATION, ALPHA, LIMIT: see Gate. INTERLEAVED: rows of gate and up alternate; otherwise all of gate come first.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        # Not earlier: the next kernel reads the chosen experts before it waits for this one.
        gdc_launch_dependents()
    pair = tl.program_id(1)
    x_ptr += (pair // TOP_K).to(tl.int64) * x_stride
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    # Each output's rows of gate and up are adjacent, or WIDTH apart.
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    APART: tl.constexpr = 1 if INTERLEAVED else WIDTH
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_ptr = gate_up_ptr + expert * (2 * WIDTH * K)
    up_ptr = gate_ptr + APART * K
    gate_acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    up_acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares_K = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        gate_NK = rows_of(gate_ptr, STEP * row_N, k, STEP * WIDTH, K, BLOCK_K)
        up_NK = rows_of(up_ptr, STEP * row_N, k, STEP * WIDTH, K, BLOCK_K)
        column_K = k + tl.arange(0, BLOCK_K)
        x_K = tl.load(x_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
        if NORM:
            squares_K += x_K * x_K
            norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
            if OFFSET != 0:
                norm_weight_K += OFFSET
            x_K *= norm_weight_K
        gate_NK = gate_NK.to(tl.float32)
        up_NK = up_NK.to(tl.float32)
        if scales_ptr is not None:
            inside_N = row_N < WIDTH
            first_row = expert * ((2 * WIDTH + TILE_ROWS - 1) // TILE_ROWS)
            gate_row_N = first_row + STEP * row_N // TILE_ROWS
            gate_NK = scaled(gate_NK, scales_ptr, zeros_ptr, gate_row_N, inside_N, k, K, TILE_COLUMNS)
            up_row_N = first_row + (STEP * row_N + APART) // TILE_ROWS
            up_NK = scaled(up_NK, scales_ptr, zeros_ptr, up_row_N, inside_N, k, K, TILE_COLUMNS)
        gate_acc_NK += gate_NK * x_K[None, :]
        up_acc_NK += up_NK * x_K[None, :]
    gate_N = tl.sum(gate_acc_NK, 1)
    up_N = tl.sum(up_acc_NK, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_K, 0) / K + eps)
        gate_N *= scale
        up_N *= scale
    mask_N = row_N < WIDTH
    if bias_ptr is not None:
        bias_ptrs_N = bias_ptr + expert * (2 * WIDTH) + STEP * row_N
        gate_N += tl.load(bias_ptrs_N, mask=mask_N, other=0.0).to(tl.float32)
        up_N += tl.load(bias_ptrs_N + APART, mask=mask_N, other=0.0).to(tl.float32)
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    gate_N = gate_N.to(dtype).to(tl.float32)
    up_N = up_N.to(dtype).to(tl.float32)
    hidden_N = gate_of_experts(gate_N, up_N, ACTIVATION, ALPHA, LIMIT, dtype)
    tl.store(hidden_ptr + pair * WIDTH + row_N, hidden_N.to(dtype), mask=mask_N)


@quick_launches
@triton.jit
def by_token_down_kernel(
    hidden_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute the second linear of each token's experts, and their sum. Program (rows, token) computes ROWS outputs.

    hidden_ptr: [S, WIDTH]; down_ptr: [E, HIDDEN_SIZE, WIDTH]; bias_ptr: [E, HIDDEN_SIZE] or None.
    chosen_ptr, weights_ptr: [S], the experts and their weights in the sum.
    residual_ptr: [T, HIDDEN_SIZE], added to the sum, or None; out_ptr: [T, HIDDEN_SIZE].
    scales_ptr, zeros_ptr, TILE_ROWS, TILE_COLUMNS: of codes, see grouped_kernel; BLOCK_K is a multiple of TILE_COLUMNS.
    """
    SIZE: tl.constexpr = down_ptr.dtype.element_ty.primitive_bitwidth // 8
    token = tl.program_id(1)
    chosen_ptr += token * TOP_K
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        if WIDTH * SIZE % 16 == 0:
            first = tl.program_id(0) * ROWS
            num_bytes = tl.minimum(ROWS, HIDDEN_SIZE - first) * (WIDTH * SIZE)
            for slot in tl.static_range(TOP_K):
                row = tl.load(chosen_ptr + slot).to(tl.int64) * HIDDEN_SIZE + first
                ask_into_l2(down_ptr + row * WIDTH, num_bytes)
        gdc_wait()
    weights_ptr += token * TOP_K
    hidden_ptr += token * (TOP_K * WIDTH)
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_N = row_N < HIDDEN_SIZE
    acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    bias_N = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(chosen_ptr + slot).to(tl.int64)
        weight = tl.load(weights_ptr + slot)
        expert_ptr = down_ptr + expert * (HIDDEN_SIZE * WIDTH)
        if bias_ptr is not None:
            bias_N += weight * tl.load(bias_ptr + expert * HIDDEN_SIZE + row_N, mask=mask_N, other=0.0).to(tl.float32)
        for k in tl.static_range(0, WIDTH, BLOCK_K):
            down_NK = rows_of(expert_ptr, row_N, k, HIDDEN_SIZE, WIDTH, BLOCK_K)
            column_K = k + tl.arange(0, BLOCK_K)
            hidden_K = tl.load(hidden_ptr + slot * WIDTH + column_K, mask=column_K < WIDTH, other=0.0)
            down_NK = down_NK.to(tl.float32)
            if scales_ptr is not None:
                scale_row_N = expert * ((HIDDEN_SIZE + TILE_ROWS - 1) // TILE_ROWS) + row_N // TILE_ROWS
                down_NK = scaled(down_NK, scales_ptr, zeros_ptr, scale_row_N, mask_N, k, WIDTH, TILE_COLUMNS)
            acc_NK += down_NK * (hidden_K.to(tl.float32) * weight)[None, :]
    y_N = tl.sum(acc_NK, 1) + bias_N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        y_N = y_N.to(dtype).to(tl.float32) + tl.load(
            residual_ptr + token * HIDDEN_SIZE + row_N, mask=mask_N, other=0.0
        ).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN_SIZE + row_N, y_N.to(dtype), mask=mask_N)
