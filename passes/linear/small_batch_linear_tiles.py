"""Triton kernel of the small-batch linear for a few tokens: reads each weight tile once, through the tensor cores.

The product is bound by latency and bandwidth. Weights are therefore loaded before the kernel waits for the previous one
(programmatic dependent launch): into shared memory if a program reads a single tile, otherwise prefetched into the L2
cache, in part if large. K is split between the warps of a program (GROUPS, a batched product summed on chip) or between
programs (SPLIT_K), so that few rows still occupy every multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.small_batch_linear_gemv import finish


@triton.jit
def weight_rows(first: tl.tensor, num_outputs: tl.tensor, ROWS: tl.constexpr, SILU_MUL: tl.constexpr) -> tl.tensor:
    """Return the indices of the weight's ROWS rows for the outputs from `first` on.

    Past the last output, the last row repeats. With SILU_MUL the weight has num_outputs rows of gate, then as many of
    up; here each gate row precedes its up row.
    """
    row_N = tl.arange(0, ROWS)
    if SILU_MUL:
        return tl.minimum(first + row_N // 2, num_outputs - 1) + row_N % 2 * num_outputs
    else:
        return tl.minimum(first + row_N, num_outputs - 1)


@triton.jit
def _ask_into_l2(ptr: tl.tensor, num_bytes: tl.tensor) -> None:
    """Prefetch `num_bytes` bytes, starting at `ptr`, into the L2 cache, by one thread and without waiting.

    The address and `num_bytes` must be multiples of 16.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ask_for_rows(
    w_ptr: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    num_outputs: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SILU_MUL: tl.constexpr,
) -> None:
    """Prefetch COLUMNS columns, starting at column k, of the rows that weight_rows returns into the L2 cache.

    first: the first output. If COLUMNS is K, whole rows are prefetched in one request, since they are contiguous.
    """
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    for half in tl.static_range(2 if SILU_MUL else 1):
        half_ptr = w_ptr + (first + half * num_outputs).to(tl.int64) * K + k
        if COLUMNS == K:
            _ask_into_l2(half_ptr, tl.minimum(OUTPUTS, num_outputs - first) * (K * SIZE))
        else:
            for i in tl.static_range(OUTPUTS):
                row = tl.minimum(i, num_outputs - 1 - first).to(tl.int64)
                _ask_into_l2(half_ptr + row * K, tl.full([], COLUMNS * SIZE, tl.int32))


@triton.jit
def _columns(k: tl.tensor, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Return the indices of consecutive columns from k on: [1, BLOCK_K], or [GROUPS, 1, BLOCK_K] for several groups."""
    if GROUPS == 1:
        return (k + tl.arange(0, BLOCK_K))[None, :]
    else:
        return (k + tl.arange(0, GROUPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :])[:, None, :]


@triton.jit
def _tile(
    row_ptr_R: tl.tensor,
    mask_R: tl.tensor | None,
    columns: tl.tensor,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    POLICY: tl.constexpr,
) -> tl.tensor:
    """Load a tile [R, BLOCK_K], or [GROUPS, R, BLOCK_K], of the rows at row_ptr_R, and return the tile.

    Elements are zero in rows for which mask_R is false, and from column K on. columns: see _columns. mask_R None: load
    all rows. EVEN: all columns are below K. POLICY: eviction policy of the load.
    """
    if len(columns.shape) == 3:
        row_ptr_R = row_ptr_R[None, :]
        mask_R = None if mask_R is None else mask_R[None, :]
    mask = None if mask_R is None else tl.expand_dims(mask_R, -1)
    if not EVEN:
        mask = columns < K if mask is None else mask & (columns < K)
    pointers = tl.expand_dims(row_ptr_R, -1) + columns
    if mask is None:
        return tl.load(pointers, eviction_policy=POLICY)
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _transposed(tile: tl.tensor) -> tl.tensor:
    if len(tile.shape) == 2:
        return tl.trans(tile)
    else:
        return tl.trans(tile, (0, 2, 1))


@triton.jit
def _product(
    x: tl.tensor,
    w: tl.tensor,
    acc: tl.tensor,
    squares: tl.tensor,
    norm_weight_ptr: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Add the product of one step to acc, and return (acc, squares). The product is W x^T if ROWS_FIRST, else x W^T.

    NORM: multiply x by the norm's weight (plus OFFSET) first, and add the row sums of x * x to `squares`; otherwise
    `squares` is returned unchanged. x, w, columns: as _tile and _columns return them.
    """
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, len(x.shape) - 1)
        norm_weight = tl.load(norm_weight_ptr + columns, mask=None if EVEN else columns < K)
        norm_weight = norm_weight.to(tl.float32)
        if OFFSET != 0:
            norm_weight += OFFSET
        x = (wide * norm_weight).to(x.dtype)
    if ROWS_FIRST:
        acc = tl.dot(w, _transposed(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, _transposed(w), acc, input_precision="ieee")
    return acc, squares


@triton.jit
def _leave_partial(
    y_TN: tl.tensor, partial_ptr_TN: tl.tensor, counter_ptr: tl.tensor, SPLIT_K: tl.constexpr
) -> tl.tensor:
    """Store the partial sums [TOKENS, ROWS] of a split of K. Return whether all splits of the tile are now stored.

    If they are, this program must add the partial sums of all splits. partial_ptr_TN: pointers to the partial sums of
    the tile's split 0. counter_ptr: the tile's counter, int32, 0 before and after the launch.
    """
    tl.store(partial_ptr_TN + tl.program_id(1) * (y_TN.shape[0] * y_TN.shape[1]), y_TN)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _sum_of_partials(
    partial_ptr_TN: tl.tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLIT_K: tl.constexpr
) -> tl.tensor:
    """Return the sum of a tile's partial sums, [TOKENS, ROWS], in a fixed order, whichever split finished last.

    The loads bypass the L1 cache, which does not see other programs' writes.
    """
    y_TN = tl.zeros([TOKENS, ROWS], tl.float32)
    for split in tl.static_range(SPLIT_K):
        y_TN += tl.load(partial_ptr_TN + split * (TOKENS * ROWS), cache_modifier=".cg")
    return y_TN


@quick_launches
@triton.jit(do_not_specialize=["eps", "num_outputs", "num_tokens"])
def few_tokens_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    eps: tl.tensor,
    num_outputs: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    COLUMNS_AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute a linear with its norm, activation and residual for a few tokens; see small_batch_linear_op.reference.

    Program (rows, split, tokens) multiplies ROWS rows of the weight by TOKENS tokens, over one of SPLIT_K parts of K.
    The program that finishes last among a tile's splits adds the partial sums of all splits and writes the results.

    x_ptr: [num_tokens, K], rows x_stride apart; w_ptr: [N, K]; bias_ptr: [N]; norm_weight_ptr: [K].
    residual_ptr, out_ptr: [num_tokens, num_outputs].
    partial_ptr: float32 [tiles, SPLIT_K, TOKENS, ROWS]; counter_ptr: int32 [tiles]; both unused with SPLIT_K 1.
    BIAS, NORM, RESIDUAL: whether there are such operands; NORM requires SPLIT_K 1. OFFSET: added to the norm's weight.
    SILU_MUL: w has num_outputs rows of gate, then as many of up; ROWS counts both.
    BLOCK_K, GROUPS: see small_batch_linear_op.Tiles. COLUMNS_AHEAD: columns of the program's rows that are prefetched
        into the L2 cache before the wait for the previous kernel.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    # Tensor cores need 64 rows on the left: tokens if there are as many, otherwise rows of the weight.
    ROWS_FIRST: tl.constexpr = TOKENS < 64
    LEFT: tl.constexpr = ROWS if ROWS_FIRST else TOKENS
    RIGHT: tl.constexpr = TOKENS if ROWS_FIRST else ROWS
    STEP: tl.constexpr = GROUPS * BLOCK_K
    STEPS: tl.constexpr = (K + SPLIT_K * STEP - 1) // (SPLIT_K * STEP)
    EVEN: tl.constexpr = K % (SPLIT_K * STEP) == 0
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    first = tl.program_id(0) * OUTPUTS
    row_N = weight_rows(first, num_outputs, ROWS, SILU_MUL)
    w_row_ptr_N = w_ptr + row_N.to(tl.int64) * K
    start = tl.program_id(1) * (STEPS * STEP)
    columns = _columns(start, GROUPS, BLOCK_K)
    if STEPS == 1:
        w = _tile(w_row_ptr_N, None, columns, K, EVEN, "evict_first")
    elif COLUMNS_AHEAD > 0 and EVEN:
        _ask_for_rows(w_ptr, first, start, num_outputs, K, COLUMNS_AHEAD, ROWS, SILU_MUL)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    token_T = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    x_row_ptr_T = x_ptr + token_T.to(tl.int64) * x_stride
    mask_T = token_T < num_tokens
    output_M = first + tl.arange(0, OUTPUTS)
    offsets_TM = token_T.to(tl.int64)[:, None] * num_outputs + output_M[None, :]
    mask_TM = mask_T[:, None] & (output_M < num_outputs)[None, :]
    residual_TM = None
    if RESIDUAL and TOKENS < 64:  # with more tokens it would take registers from the product
        residual_TM = tl.load(residual_ptr + offsets_TM, mask=mask_TM, other=0.0)
    if GROUPS == 1:
        acc = tl.zeros([LEFT, RIGHT], tl.float32)
        squares = tl.zeros([TOKENS], tl.float32)
    else:
        acc = tl.zeros([GROUPS, LEFT, RIGHT], tl.float32)
        squares = tl.zeros([GROUPS, TOKENS], tl.float32)
    if STEPS == 1:
        x = _tile(x_row_ptr_T, mask_T, columns, K, EVEN, "evict_last")
        acc, squares = _product(x, w, acc, squares, norm_weight_ptr, columns, K, NORM, OFFSET, ROWS_FIRST, EVEN)
    else:
        for i in tl.range(0, STEPS, num_stages=NUM_STAGES):
            columns = _columns(start + i * STEP, GROUPS, BLOCK_K)
            w = _tile(w_row_ptr_N, None, columns, K, EVEN, "evict_first")
            x = _tile(x_row_ptr_T, mask_T, columns, K, EVEN, "evict_last")
            acc, squares = _product(x, w, acc, squares, norm_weight_ptr, columns, K, NORM, OFFSET, ROWS_FIRST, EVEN)
    if GROUPS > 1:
        acc = tl.sum(acc, 0)
        squares = tl.sum(squares, 0)
    y_TN = tl.trans(acc) if ROWS_FIRST else acc
    if NORM:
        y_TN *= tl.rsqrt(squares / K + eps)[:, None]
    if SPLIT_K > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        element_TN = tl.arange(0, TOKENS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        partial_ptr_TN = partial_ptr + tile.to(tl.int64) * (SPLIT_K * TOKENS * ROWS) + element_TN
        if not _leave_partial(y_TN, partial_ptr_TN, counter_ptr + tile, SPLIT_K):
            return
        y_TN = _sum_of_partials(partial_ptr_TN, TOKENS, ROWS, SPLIT_K)
    if RESIDUAL and TOKENS >= 64:
        residual_TM = tl.load(residual_ptr + offsets_TM, mask=mask_TM, other=0.0)
    if BIAS:
        y_TN += tl.load(bias_ptr + row_N).to(tl.float32)
    if SILU_MUL:
        gate_TM, up_TM = tl.split(tl.reshape(y_TN, offsets_TM.shape + [2]))  # noqa: RUF005 (Triton has no star)
        finish(gate_TM, up_TM, residual_TM, out_ptr, offsets_TM, mask_TM, SILU_MUL, ACTIVATION, RESIDUAL)
    else:
        finish(y_TN, None, residual_TM, out_ptr, offsets_TM, mask_TM, SILU_MUL, ACTIVATION, RESIDUAL)
