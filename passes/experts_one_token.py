"""Triton kernels: the experts of a single token, products of matrix and vector at memory bandwidth."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.experts_routing import chosen_experts
from compiled_engine.passes.silu_mul import gated
from compiled_engine.passes.small_batch_linear_gemv import rows_of


@quick_launches
@triton.jit(do_not_specialize=["eps"])
def one_token_gate_up_kernel(
    x_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (rows, slot): ROWS outputs of activation(gate) * up of one of the token's experts.

    Each program chooses for itself, which takes less than another launch. hidden: [TOP_K, WIDTH].
    """
    BLOCK_X: tl.constexpr = triton.next_power_of_2(TOP_K)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(1)
    x_X = tl.arange(0, BLOCK_X)
    expert_X, weight_X = chosen_experts(logits_ptr, NUM_EXPERTS, BLOCK_E, TOP_K, BLOCK_X, RENORMALISE)
    if (tl.program_id(0) == 0) & (slot == 0):
        tl.store(chosen_ptr + x_X, expert_X, mask=x_X < TOP_K)
        tl.store(weights_ptr + x_X, weight_X, mask=x_X < TOP_K)
    expert = tl.sum(tl.where(x_X == slot, expert_X, 0), 0).to(tl.int64)
    gate_ptr = gate_up_ptr + expert * (2 * WIDTH * K)
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    up_acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares_K = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        gate_NK = rows_of(gate_ptr, row_N, k, WIDTH, K, BLOCK_K)
        up_NK = rows_of(gate_ptr + WIDTH * K, row_N, k, WIDTH, K, BLOCK_K)
        column_K = k + tl.arange(0, BLOCK_K)
        x_K = tl.load(x_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
        if NORM:
            squares_K += x_K * x_K
            norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
            if OFFSET != 0:
                norm_weight_K += OFFSET
            x_K *= norm_weight_K
        gate_acc_NK += gate_NK.to(tl.float32) * x_K[None, :]
        up_acc_NK += up_NK.to(tl.float32) * x_K[None, :]
    gate_N = tl.sum(gate_acc_NK, 1)
    up_N = tl.sum(up_acc_NK, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_K, 0) / K + eps)
        gate_N *= scale
        up_N *= scale
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    gate_N = gate_N.to(dtype).to(tl.float32)
    up_N = up_N.to(dtype).to(tl.float32)
    tl.store(hidden_ptr + slot * WIDTH + row_N, gated(gate_N, up_N, ACTIVATION, dtype).to(dtype), mask=row_N < WIDTH)


@quick_launches
@triton.jit
def one_token_down_kernel(
    hidden_ptr: tl.tensor,
    down_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program: ROWS outputs, of all the token's experts, weighted and summed; plus the residual, if there is one."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert_ptr = down_ptr + tl.load(chosen_ptr + slot).to(tl.int64) * (HIDDEN_SIZE * WIDTH)
        weight = tl.load(weights_ptr + slot)
        for k in tl.static_range(0, WIDTH, BLOCK_K):
            down_NK = rows_of(expert_ptr, row_N, k, HIDDEN_SIZE, WIDTH, BLOCK_K)
            column_K = k + tl.arange(0, BLOCK_K)
            hidden_K = tl.load(hidden_ptr + slot * WIDTH + column_K, mask=column_K < WIDTH, other=0.0)
            acc_NK += down_NK.to(tl.float32) * (hidden_K.to(tl.float32) * weight)[None, :]
    y_N = tl.sum(acc_NK, 1)
    mask_N = row_N < HIDDEN_SIZE
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        y_N = y_N.to(dtype).to(tl.float32) + tl.load(residual_ptr + row_N, mask=mask_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row_N, y_N.to(dtype), mask=mask_N)
