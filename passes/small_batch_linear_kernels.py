"""Triton kernels of the small-batch linear: one for a single token, one for up to a few dozen.

Both stream the weight once, at memory bandwidth. It depends on no earlier kernel, so its first tile is loaded before
the kernel waits for them (programmatic dependent launch). With a single token the norm is taken in by linearity:
RMSNorm(x) @ W^T is (x * norm_weight) @ W^T, times a factor whose sum of squares is collected on the way. With more
tokens every program would repeat it, which costs more than a kernel of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _finish(
    y: tl.tensor,
    up: tl.tensor,
    out_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    SILU_MUL: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """What follows the product, rounded where the textbook rounds: silu(y) * up, or residual + y; then the store."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SILU_MUL:
        y = y.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        y = (y * tl.sigmoid(y)).to(dtype).to(tl.float32) * up
    if RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = y.to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + offsets, y.to(dtype), mask=mask)


@triton.jit
def _rows_of(
    w_ptr: tl.tensor,
    row_N: tl.tensor,
    k: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
) -> tl.tensor:
    """[N, BLOCK_K] of the weight from column k on; zeros beyond its edges. Read once, so not kept in the cache."""
    column_K = k + tl.arange(0, BLOCK_K)
    pointers_NK = w_ptr + row_N[:, None].to(tl.int64) * K + column_K[None, :]
    if K % (BLOCK_K * SPLIT_K) == 0:
        return tl.load(pointers_NK, mask=row_N[:, None] < num_rows, other=0.0, eviction_policy="evict_first")
    else:
        mask_NK = (row_N[:, None] < num_rows) & (column_K[None, :] < K)
        return tl.load(pointers_NK, mask=mask_NK, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["eps", "num_rows"])
def one_token_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program: ROWS results. With SILU_MUL the weight has num_rows rows of gate, then as many of up."""
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w_NK = _rows_of(w_ptr, row_N, 0, num_rows, K, BLOCK_K, 1)
    up_ptr = w_ptr + num_rows.to(tl.int64) * K
    if SILU_MUL:
        up_NK = _rows_of(up_ptr, row_N, 0, num_rows, K, BLOCK_K, 1)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    up_acc_NK = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares_K = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        if k > 0:
            w_NK = _rows_of(w_ptr, row_N, k, num_rows, K, BLOCK_K, 1)
            if SILU_MUL:
                up_NK = _rows_of(up_ptr, row_N, k, num_rows, K, BLOCK_K, 1)
        column_K = k + tl.arange(0, BLOCK_K)
        x_K = tl.load(x_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
        if NORM:
            squares_K += x_K * x_K
            x_K *= tl.load(norm_weight_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
        acc_NK += w_NK.to(tl.float32) * x_K[None, :]
        if SILU_MUL:
            up_acc_NK += up_NK.to(tl.float32) * x_K[None, :]
    y_N = tl.sum(acc_NK, 1)
    up_N = tl.sum(up_acc_NK, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_K, 0) / K + eps)
        y_N *= scale
        up_N *= scale
    mask_N = row_N < num_rows
    if BIAS:
        y_N += tl.load(bias_ptr + row_N, mask=mask_N, other=0.0).to(tl.float32)
        if SILU_MUL:
            up_N += tl.load(bias_ptr + num_rows + row_N, mask=mask_N, other=0.0).to(tl.float32)
    _finish(y_N, up_N, out_ptr, residual_ptr, row_N, mask_N, SILU_MUL, RESIDUAL)


@triton.jit
def _token_tile(
    x_ptr: tl.tensor,
    token_T: tl.tensor,
    k: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
) -> tl.tensor:
    """[T, BLOCK_K] of x from column k on; zeros beyond its edges. Every program reads it, so it stays in the cache."""
    column_K = k + tl.arange(0, BLOCK_K)
    pointers_TK = x_ptr + token_T[:, None] * x_stride + column_K[None, :]
    mask_TK = token_T[:, None] < num_tokens
    if K % (BLOCK_K * SPLIT_K) != 0:
        mask_TK = mask_TK & (column_K[None, :] < K)
    return tl.load(pointers_TK, mask=mask_TK, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def few_tokens_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (rows, split, tokens): ROWS results of TOKENS tokens, over one of SPLIT_K parts of K.

    The split that arrives last adds up what all have left in partial_ptr (float32 [splits, T, N]), in order, and
    finishes; the tile's counter is 0 again then. SILU_MUL goes with one split only.
    """
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token_T = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    PART: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    first = split * PART
    up_ptr = w_ptr + num_rows.to(tl.int64) * K
    w_NK = _rows_of(w_ptr, row_N, first, num_rows, K, BLOCK_K, SPLIT_K)
    if SILU_MUL:
        up_NK = _rows_of(up_ptr, row_N, first, num_rows, K, BLOCK_K, SPLIT_K)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    x_TK = _token_tile(x_ptr, token_T, first, num_tokens, x_stride, K, BLOCK_K, SPLIT_K)
    acc_NT = tl.dot(w_NK, tl.trans(x_TK), input_precision="ieee")
    up_NT = tl.zeros([ROWS, TOKENS], tl.float32)
    if SILU_MUL:
        up_NT = tl.dot(up_NK, tl.trans(x_TK), input_precision="ieee")
    for k in tl.range(first + BLOCK_K, first + PART, BLOCK_K, num_stages=NUM_STAGES):
        w_NK = _rows_of(w_ptr, row_N, k, num_rows, K, BLOCK_K, SPLIT_K)
        x_TK = _token_tile(x_ptr, token_T, k, num_tokens, x_stride, K, BLOCK_K, SPLIT_K)
        acc_NT = tl.dot(w_NK, tl.trans(x_TK), acc_NT, input_precision="ieee")
        if SILU_MUL:
            up_NK = _rows_of(up_ptr, row_N, k, num_rows, K, BLOCK_K, SPLIT_K)
            up_NT = tl.dot(up_NK, tl.trans(x_TK), up_NT, input_precision="ieee")
    offsets_NT = token_T[None, :] * num_rows + row_N[:, None]
    mask_NT = (row_N[:, None] < num_rows) & (token_T[None, :] < num_tokens)
    if SPLIT_K > 1:
        size = num_tokens.to(tl.int64) * num_rows
        tl.store(partial_ptr + split * size + offsets_NT, acc_NT, mask=mask_NT)
        tl.debug_barrier()
        tile_counter_ptr = counter_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        arrived = tl.atomic_add(tile_counter_ptr, 1, sem="acq_rel")
        if arrived < SPLIT_K - 1:
            return
        tl.store(tile_counter_ptr, 0)
        acc_NT = tl.zeros([ROWS, TOKENS], tl.float32)
        for part in tl.static_range(SPLIT_K):
            acc_NT += tl.load(partial_ptr + part * size + offsets_NT, mask=mask_NT, other=0.0, volatile=True)
    if BIAS:
        acc_NT += tl.load(bias_ptr + row_N, mask=row_N < num_rows, other=0.0).to(tl.float32)[:, None]
        if SILU_MUL:
            up_NT += tl.load(bias_ptr + num_rows + row_N, mask=row_N < num_rows, other=0.0).to(tl.float32)[:, None]
    _finish(acc_NT, up_NT, out_ptr, residual_ptr, offsets_NT, mask_NT, SILU_MUL, RESIDUAL)
