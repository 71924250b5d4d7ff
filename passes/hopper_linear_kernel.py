"""Gluon kernel of a linear for 33 to 128 tokens on Hopper: one warp copies, groups of four warps compute.

Rows of the weight stand on the left of the tensor cores' products, where 64 at a time must be, and tokens on the right.
The weight's first tiles are under way before the kernel waits for earlier ones (programmatic dependent launch). With
GATED eight rows of gate are followed by their eight of up, so that one thread holds both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches

# Rows of the weight that a group of warps takes; columns of a step: 128 bytes, by which shared memory is swizzled.
ROWS = gl.constexpr(64)
STEP = gl.constexpr(64)
# Rows of gate that lie together, followed by as many of up.
BLOCK = gl.constexpr(8)
BLOCKS = gl.constexpr(64 // (2 * 8))
# Registers of a thread that copies.
COPYING_REGISTERS = gl.constexpr(24)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BLOCKS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
# Triton 3.9 has other names for both.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Ring(NamedTuple):
    """Stages of the weight, [stages * groups, ROWS, STEP], and of tokens, [stages, tokens, STEP]; for each stage the
    barriers that say that it is full, and that all groups of warps have done with it."""

    weights: Any
    tokens: Any
    full: Any
    empty: Any


class Form(NamedTuple):
    """What a kernel is compiled for: steps of K, groups of warps that compute, tokens, stages, gate and up."""

    steps: Any
    groups: Any
    tokens: Any
    stages: Any
    gated: Any


@gluon.constexpr_function
def form_of(*numbers: Any) -> Form:
    return Form(*numbers)


@gluon.jit
def _load_weight(w_desc, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """A stage's rows of the weight, in blocks of gate and up if it is gated; its barrier waits for the tokens too."""
    groups: gl.constexpr = FORM.groups
    full = ring.full.index(stage)
    mbarrier.expect(full, (groups * ROWS + FORM.tokens) * STEP * 2)
    for i in gl.static_range(groups):
        group = gl.program_id(0) * groups + i
        place = ring.weights.index(stage * groups + i)
        if not FORM.gated:
            load_box(w_desc, [group * ROWS, step * STEP], full, place)
        elif RENAMED:
            boxes = place.reinterpret(place.dtype, [BLOCKS, 2, BLOCK, STEP], BLOCKS_SHARED)
            load_box(w_desc, [group * BLOCKS, 0, 0, step * STEP], full, boxes)
        else:
            boxes = place._reinterpret(place.dtype, [BLOCKS, 2, BLOCK, STEP], BLOCKS_SHARED)
            load_box(w_desc, [group * BLOCKS, 0, 0, step * STEP], full, boxes)


@gluon.jit
def _copy(w_desc, x_desc, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies: the first stages' weights before the wait, their tokens after it, then all others."""
    stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(stages, FORM.steps)
    for i in range(ahead):
        _load_weight(w_desc, i, i, ring, FORM)
    gdc_wait()
    for i in range(ahead):
        load_box(x_desc, [0, i * STEP], ring.full.index(i), ring.tokens.index(i))
    for i in range(ahead, FORM.steps):
        stage = i % stages
        mbarrier.wait(ring.empty.index(stage), (i // stages) & 1 ^ 1)
        _load_weight(w_desc, i, stage, ring, FORM)
        load_box(x_desc, [0, i * STEP], ring.full.index(stage), ring.tokens.index(stage))


@gluon.jit
def _gated(gate, up, dtype: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """activation(gate) * up in fp32, rounded where the textbook rounds: see silu_mul."""
    gate = gate.to(dtype).to(gl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1 + gl.exp2(gate * -1.4426950408889634))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
        inner = gate + 0.044715 * gate * gate * gate
        activated = gate / (1 + gl.exp2(inner * -2.302208198144325))
    else:
        activated = 0.5 * gate * (1 + gl.erf(gate * 0.7071067811865476))
    return activated.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    out_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    out_smem,
    ring,
    FORM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A group of warps: ROWS rows of the weight times the tokens. Results pass through shared memory, which turns
    them."""
    tokens: gl.constexpr = FORM.tokens
    stages: gl.constexpr = FORM.stages
    outputs: gl.constexpr = ROWS // 2 if FORM.gated else ROWS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // outputs, outputs // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out_smem.dtype
    acc_NT = gl.zeros([ROWS, tokens], gl.float32, acc_layout)
    for i in range(FORM.steps):
        stage = i % stages
        mbarrier.wait(ring.full.index(stage), (i // stages) & 1)
        x_KT = ring.tokens.index(stage).permute((1, 0))
        acc_NT = warpgroup_mma(ring.weights.index(stage * FORM.groups + GROUP), x_KT, acc_NT, is_async=True)
        acc_NT = warpgroup_mma_wait(1, deps=(acc_NT,))
        if i > 0:
            mbarrier.arrive(ring.empty.index((i - 1) % stages), count=1)
    acc_NT = warpgroup_mma_wait(0, deps=(acc_NT,))
    first = (gl.program_id(0) * FORM.groups + GROUP) * outputs
    if bias_ptr is not None:
        row_N = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
        output_N = first + row_N
        bias_at_N = output_N
        if FORM.gated:
            output_N = first + row_N // (2 * BLOCK) * BLOCK + row_N % BLOCK
            bias_at_N = output_N + row_N // BLOCK % 2 * num_outputs
        bias_N = gl.load(bias_ptr + bias_at_N, mask=output_N < num_outputs, other=0.0)
        acc_NT += bias_N.to(gl.float32)[:, None]
    if FORM.gated:
        pairs = acc_NT.reshape([BLOCKS, 2, BLOCK, tokens]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        y_NT = _gated(gate, up, dtype, ACTIVATION).reshape([outputs, tokens])
    else:
        y_NT = acc_NT
    out_smem.permute((1, 0)).store(y_NT.to(dtype))
    token_T = gl.arange(0, tokens, layout=gl.SliceLayout(1, io_layout))
    output_M = first + gl.arange(0, outputs, layout=gl.SliceLayout(0, io_layout))
    there_TM = (token_T < num_tokens)[:, None] & (output_M < num_outputs)[None, :]
    gl.store(out_ptr + token_T[:, None] * num_outputs + output_M[None, :], out_smem.load(io_layout), mask=there_TM)


@quick_launches
@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_linear_kernel(  # type: ignore[no-untyped-def]
    w_desc,
    x_desc,
    out_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Program: GROUPS (1 to 3) times ROWS rows of the weight, and all tokens, of which there are TOKENS at most.

    w_desc: of the weight, [N, K] in boxes of [ROWS, STEP], or, GATED, [N / 2 / BLOCK, 2, BLOCK, K] in boxes of
    [BLOCKS, 2, BLOCK, STEP]; x_desc: [num_tokens, K] in boxes of [TOKENS, STEP]; out: [num_tokens, num_outputs],
    contiguous. REGISTERS: of a thread that computes.
    """
    gdc_launch_dependents()
    FORM: gl.constexpr = form_of((K + STEP - 1) // STEP, GROUPS, TOKENS, STAGES, GATED)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    outputs: gl.constexpr = ROWS // 2 if GATED else ROWS
    out_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=outputs * 2, element_bitwidth=16, rank=2)
    out_smem = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, outputs], out_shared)
    ring = Ring(
        gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, STEP], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, STEP], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
    fence_async_shared()
    # A tuple that is kept in a variable would turn what is known at compile time into values.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(0), ring, FORM, ACTIVATION, 0)),
                (_copy, (w_desc, x_desc, ring, FORM)),
            ],
            [1],
            [COPYING_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(0), ring, FORM, ACTIVATION, 0)),
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(1), ring, FORM, ACTIVATION, 1)),
                (_copy, (w_desc, x_desc, ring, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(0), ring, FORM, ACTIVATION, 0)),
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(1), ring, FORM, ACTIVATION, 1)),
                (_compute, (out_ptr, bias_ptr, num_tokens, num_outputs, out_smem.index(2), ring, FORM, ACTIVATION, 2)),
                (_copy, (w_desc, x_desc, ring, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    gdc_wait()
