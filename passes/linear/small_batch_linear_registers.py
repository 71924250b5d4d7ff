"""Gluon kernel of a linear for up to eight tokens: operands go from memory into registers, without shared memory.

Threads load 16 bytes at a time in the layout that the tensor cores read. Any order of columns gives the same sums, so
each thread multiplies the neighbouring columns that it loaded. The first weights are loaded before the kernel waits for
the previous one (programmatic dependent launch). K is split between the warps of a program, whose sums are added at the
end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.small_batch_linear_gemv import finish

# Rows of the tensor cores' left operand, and how many of them hold tokens.
LEFT = gl.constexpr(16)
TOKENS = gl.constexpr(8)
# Neighbouring elements per load of a thread: 16 bytes.
WIDTH = gl.constexpr(8)


@gluon.jit
def _asked_for(  # type: ignore[no-untyped-def]
    tiles, w_ptr, offsets_GKN, step: gl.constexpr, STEP: gl.constexpr, STEPS: gl.constexpr
):
    """Issue the load of a step's weight tile, without waiting for it, and return `tiles` with the tile appended.

    tiles: a tuple of the tiles loaded so far. offsets_GKN: the tile's elements at step 0, relative to w_ptr. STEP:
    columns of a step. Returns `tiles` unchanged if `step` is not below STEPS.
    """
    if step < STEPS:
        tiles = tiles + (gl.load(w_ptr + (offsets_GKN + step * STEP), eviction_policy="evict_first"),)  # noqa: RUF005
    return tiles


@quick_launches
@gluon.jit(do_not_specialize=["eps", "num_outputs", "num_tokens"])
def register_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_weight_ptr,
    residual_ptr,
    out_ptr,
    eps,
    num_outputs,
    num_tokens,
    x_stride,
    K: gl.constexpr,
    BIAS: gl.constexpr,
    NORM: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SILU_MUL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Compute a linear with its norm, activation and residual for up to eight tokens.

    See small_batch_linear_op.reference. A program computes the outputs of ROWS rows of the weight. Arguments are those
    of small_batch_linear_tiles.few_tokens_kernel. Each of GROUPS warps multiplies BLOCK_K columns of a step; K must be
    a multiple of GROUPS * BLOCK_K. AHEAD: number of steps whose weights are loaded ahead of their use.
    """
    OUTPUTS: gl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    STEP: gl.constexpr = GROUPS * BLOCK_K
    STEPS: gl.constexpr = K // STEP
    gl.static_assert(K % STEP == 0)
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, WIDTH)
    out: gl.constexpr = gl.SliceLayout(0, sums)
    # Rows past the last output repeat the last row.
    row_N = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(0, right)))
    row_N = gl.minimum(row_N, num_outputs - 1).to(gl.int64)
    group_G = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    column_K = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    offsets_GKN = group_G[:, None][:, :, None] * BLOCK_K + column_K[None, :][:, :, None]
    offsets_GKN = row_N[None, :][None, :, :] * K + offsets_GKN
    up_ptr = w_ptr + num_outputs.to(gl.int64) * K
    gates = ()
    ups = ()
    for i in gl.static_range(AHEAD):
        gates = _asked_for(gates, w_ptr, offsets_GKN, i, STEP, STEPS)
        if SILU_MUL:
            ups = _asked_for(ups, up_ptr, offsets_GKN, i, STEP, STEPS)
    gdc_launch_dependents()
    gdc_wait()

    out_token_T = gl.arange(0, LEFT, gl.SliceLayout(1, out))
    output_N = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, out))
    offsets_TN = out_token_T.to(gl.int64)[:, None] * num_outputs + output_N[None, :]
    mask_TN = (out_token_T < gl.minimum(num_tokens, TOKENS))[:, None] & (output_N < num_outputs)[None, :]
    residual_TN = None
    if RESIDUAL:
        residual_TN = gl.load(residual_ptr + offsets_TN, mask=mask_TN, other=0.0)
    token_T = gl.arange(0, LEFT, gl.SliceLayout(0, gl.SliceLayout(2, left)))
    mask_1T1 = ((token_T < num_tokens) & (token_T < TOKENS))[None, :][:, :, None]
    x_group_G = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, left)))
    x_column_K = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(0, left)))
    column_G1K = x_group_G[:, None][:, :, None] * BLOCK_K + x_column_K[None, :][None, :, :]
    x_offsets_GTK = (token_T * x_stride)[None, :][:, :, None] + column_G1K
    acc_GTN = gl.zeros([GROUPS, LEFT, OUTPUTS], gl.float32, sums)
    up_acc_GTN = gl.zeros([GROUPS, LEFT, OUTPUTS], gl.float32, sums)
    squares_GT = gl.zeros([GROUPS, LEFT], gl.float32, gl.SliceLayout(2, left))
    for i in gl.static_range(STEPS):
        x_GTK = gl.load(x_ptr + (x_offsets_GTK + i * STEP), mask=mask_1T1, other=0.0)
        if NORM:
            norm_weight_G1K = gl.load(norm_weight_ptr + (column_G1K + i * STEP)).to(gl.float32)
            if OFFSET != 0:
                norm_weight_G1K += OFFSET
            wide_GTK = x_GTK.to(gl.float32)
            squares_GT += gl.sum(wide_GTK * wide_GTK, 2)
            x_GTK = (wide_GTK * norm_weight_G1K).to(x_GTK.dtype)
        gates = _asked_for(gates, w_ptr, offsets_GKN, i + AHEAD, STEP, STEPS)
        acc_GTN = mma_v2(x_GTK, gates[i], acc_GTN)
        if SILU_MUL:
            ups = _asked_for(ups, up_ptr, offsets_GKN, i + AHEAD, STEP, STEPS)
            up_acc_GTN = mma_v2(x_GTK, ups[i], up_acc_GTN)
    y_TN = gl.sum(acc_GTN, 0)
    up_TN = y_TN
    if SILU_MUL:
        up_TN = gl.sum(up_acc_GTN, 0)
    if NORM:
        scale_T = gl.convert_layout(gl.rsqrt(gl.sum(squares_GT, 0) / K + eps), gl.SliceLayout(1, out))
        y_TN *= scale_T[:, None]
        up_TN *= scale_T[:, None]
    if BIAS:
        mask_N = output_N < num_outputs
        y_TN += gl.load(bias_ptr + output_N, mask=mask_N, other=0.0).to(gl.float32)[None, :]
        if SILU_MUL:
            up_TN += gl.load(bias_ptr + num_outputs + output_N, mask=mask_N, other=0.0).to(gl.float32)[None, :]
    finish(y_TN, up_TN, residual_TN, out_ptr, offsets_TN, mask_TN, SILU_MUL, ACTIVATION, RESIDUAL)
