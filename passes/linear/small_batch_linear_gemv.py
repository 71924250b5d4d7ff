"""Triton kernel of the small-batch linear for one token: a matrix-vector product at memory bandwidth.

The weight depends on no earlier kernel, so each program loads its first columns before waiting for the previous kernel
(programmatic dependent launch). RMSNorm(x) @ W^T equals (x * norm_weight) @ W^T times a factor, so the norm's sum of
squares is accumulated along the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.silu_mul import gated


@triton.jit
def finish(
    y: tl.tensor,
    up: tl.tensor,
    residual: tl.tensor,
    out_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Store to `out` a linear's result y, or activation(y) * up, plus the residual, rounded where textbook code rounds.

    y, up: float32. offsets (into out_ptr), mask and residual have the shape of y.
    SILU_MUL: use `up`. RESIDUAL: add `residual`. With few tokens, callers load the residual along with the linear's
        operands, to avoid a wait at the end.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SILU_MUL:
        y = y.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        y = gated(y, up, ACTIVATION, dtype)
    if RESIDUAL:
        y = y.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + offsets, y.to(dtype), mask=mask)


@triton.jit
def rows_of(
    w_ptr: tl.tensor,
    row_N: tl.tensor,
    k: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return [N, BLOCK_K] of the weight: the rows row_N, from column k on; zeros beyond the weight's edges.

    w_ptr: [num_rows, K]. Each element is read once, so caches may evict it first.
    """
    column_K = k + tl.arange(0, BLOCK_K)
    pointers_NK = w_ptr + row_N[:, None].to(tl.int64) * K + column_K[None, :]
    if K % BLOCK_K == 0:
        return tl.load(pointers_NK, mask=row_N[:, None] < num_rows, other=0.0, eviction_policy="evict_first")
    else:
        mask_NK = (row_N[:, None] < num_rows) & (column_K[None, :] < K)
        return tl.load(pointers_NK, mask=mask_NK, other=0.0, eviction_policy="evict_first")


@quick_launches
@triton.jit(do_not_specialize=["eps", "num_outputs"])
def one_token_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    num_outputs: tl.tensor,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute a linear with its norm, activation and residual for one token; see small_batch_linear_op.reference.

    A program computes the results of ROWS rows of the weight.

    x_ptr, norm_weight_ptr: [K]; w_ptr: [N, K]; bias_ptr: [N]; residual_ptr, out_ptr: [num_outputs].
    BIAS, NORM, RESIDUAL: whether there are such operands. OFFSET: added to the norm's weight.
    SILU_MUL: w has num_outputs rows of gate, then as many of up; ROWS counts both.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    row_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    w_NK = rows_of(w_ptr, row_N, 0, num_outputs, K, BLOCK_K)
    up_ptr = w_ptr + num_outputs.to(tl.int64) * K
    if SILU_MUL:
        up_NK = rows_of(up_ptr, row_N, 0, num_outputs, K, BLOCK_K)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    mask_N = row_N < num_outputs
    residual_N = None
    if RESIDUAL:
        residual_N = tl.load(residual_ptr + row_N, mask=mask_N, other=0.0)
    acc_NK = tl.zeros([OUTPUTS, BLOCK_K], tl.float32)
    up_acc_NK = tl.zeros([OUTPUTS, BLOCK_K], tl.float32)
    squares_K = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        if k > 0:
            w_NK = rows_of(w_ptr, row_N, k, num_outputs, K, BLOCK_K)
            if SILU_MUL:
                up_NK = rows_of(up_ptr, row_N, k, num_outputs, K, BLOCK_K)
        column_K = k + tl.arange(0, BLOCK_K)
        x_K = tl.load(x_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
        if NORM:
            squares_K += x_K * x_K
            norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=column_K < K, other=0.0).to(tl.float32)
            if OFFSET != 0:
                norm_weight_K += OFFSET
            x_K *= norm_weight_K
        acc_NK += w_NK.to(tl.float32) * x_K[None, :]
        if SILU_MUL:
            up_acc_NK += up_NK.to(tl.float32) * x_K[None, :]
    y_N = tl.sum(acc_NK, 1)
    up_N = tl.sum(up_acc_NK, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_K, 0) / K + eps)
        y_N *= scale
        up_N *= scale
    if BIAS:
        y_N += tl.load(bias_ptr + row_N, mask=mask_N, other=0.0).to(tl.float32)
        if SILU_MUL:
            up_N += tl.load(bias_ptr + num_outputs + row_N, mask=mask_N, other=0.0).to(tl.float32)
    finish(y_N, up_N, residual_N, out_ptr, row_N, mask_N, SILU_MUL, ACTIVATION, RESIDUAL)
