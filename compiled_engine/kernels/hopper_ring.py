"""Gluon functions of the ring buffers in shared memory through which Hopper's linears read their operands.

A copying warp fills the stages of a ring one after another by TMA, and groups of computing warps read the stages in the
same order. A stage has two barriers: `full` is completed once the copied bytes have arrived, `empty` once all groups
have finished with the stage. The stage of step number `count` is count % STAGES. A barrier's phase changes each time
that the steps come to its stage again.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Bytes of a row of a box, also the swizzle of shared memory.
STEP_BYTES = gl.constexpr(128)
# Triton 3.9 has other names for these.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def step_of(bits: int) -> int:
    """Return the number of columns of a TMA copy and of a tensor-core product. bits: size of a weight's element."""
    return 64 if bits == 16 else 128


@gluon.constexpr_function
def shared_layout(bits: int, rank: int) -> Any:
    """Return the shared-memory layout of tiles [..., rows, columns].

    bits: size of an element. rank: number of dimensions of a tile.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


@gluon.jit
def reinterpreted(place, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the shared memory `place` reinterpreted in another shape and layout, with the same dtype."""
    if RENAMED:
        return place.reinterpret(place.dtype, SHAPE, LAYOUT)
    else:
        return place._reinterpret(place.dtype, SHAPE, LAYOUT)


@gluon.jit
def barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (full, empty), the new barriers of a ring buffer that GROUPS groups of warps read.

    The caller must call fence_async_shared before other warps use the barriers.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return full, empty


@gluon.jit
def stage_to_fill(empty, count, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the stage of step number `count`, once all groups have finished with the stage's previous step."""
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES) & 1 ^ 1)
    return stage


@gluon.jit
def filled_stage(full, count, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the stage of step number `count`, once the step's operands have arrived in it."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    return stage


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (stage, phase of its barriers) of the step that follows the step with this stage and phase.

    In loops that run over several tiles, counting both is faster than dividing the step's number.
    """
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase
