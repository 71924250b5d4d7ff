"""The ring of stages in shared memory through which Hopper's linear passes, and the warp that fills it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

# Rows on the left of a product of the tensor cores; its columns: 128 bytes, by which shared memory is swizzled.
ROWS = gl.constexpr(64)
STEP = gl.constexpr(64)
# Rows of gate that lie together, followed by as many of up.
BLOCK = gl.constexpr(8)
BLOCKS = gl.constexpr(64 // (2 * 8))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PARTS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
BLOCKS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5))
# Triton 3.9 has other names for these.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Ring(NamedTuple):
    """Stages of the weight, [stages * groups, products * ROWS, STEP], and of tokens,
    [stages, products * parts * tokens, STEP]; for each stage the barriers that say that it is full, and that all groups
    of warps have done with it."""

    weights: Any
    tokens: Any
    full: Any
    empty: Any


class Form(NamedTuple):
    """What a kernel is compiled for: steps of K, groups of warps that compute, tokens, stages, gate and up, parts of K
    in a product, products of a step."""

    steps: Any
    groups: Any
    tokens: Any
    stages: Any
    gated: Any
    parts: Any
    products: Any


@gluon.constexpr_function
def form_of(k: int, *numbers: Any) -> Form:
    *_, parts, products = numbers
    columns = parts * products * 64
    return Form((k + columns - 1) // columns, *numbers)


@gluon.jit
def boxes_of(place, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same shared memory in another shape."""
    if RENAMED:
        return place.reinterpret(place.dtype, SHAPE, LAYOUT)
    else:
        return place._reinterpret(place.dtype, SHAPE, LAYOUT)


@gluon.jit
def _load_weight(w_desc, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """A stage's rows of the weight, in blocks of gate and up if it is gated; its barrier waits for the tokens too."""
    groups: gl.constexpr = FORM.groups
    parts: gl.constexpr = FORM.parts
    boxes: gl.constexpr = parts * FORM.products
    rows: gl.constexpr = ROWS // parts
    blocks: gl.constexpr = BLOCKS // parts
    full = ring.full.index(stage)
    mbarrier.expect(full, (groups * ROWS + parts * FORM.tokens) * FORM.products * STEP * 2)
    column = step * (boxes * STEP)
    for i in gl.static_range(groups):
        group = gl.program_id(0) * groups + i
        place = ring.weights.index(stage * groups + i)
        if FORM.gated:
            place = boxes_of(place, [boxes, blocks, 2, BLOCK, STEP], BLOCKS_SHARED)
            load_box(w_desc, [0, group * blocks, 0, 0, column], full, place)
        else:
            place = boxes_of(place, [boxes, rows, STEP], PARTS_SHARED)
            load_box(w_desc, [0, group * rows, column], full, place)


@gluon.jit
def _load_tokens(x_desc, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    boxes: gl.constexpr = FORM.parts * FORM.products
    tokens: gl.constexpr = FORM.tokens
    place = boxes_of(ring.tokens.index(stage), [boxes, tokens, STEP], PARTS_SHARED)
    load_box(x_desc, [0, 0, step * (boxes * STEP)], ring.full.index(stage), place)


@gluon.jit
def copy(w_desc, x_desc, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies: the first stages' weights before the wait, their tokens after it, then all others."""
    stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(stages, FORM.steps)
    for i in range(ahead):
        _load_weight(w_desc, i, i, ring, FORM)
    gdc_wait()
    for i in range(ahead):
        _load_tokens(x_desc, i, i, ring, FORM)
    for i in range(ahead, FORM.steps):
        stage = i % stages
        mbarrier.wait(ring.empty.index(stage), (i // stages) & 1 ^ 1)
        _load_weight(w_desc, i, stage, ring, FORM)
        _load_tokens(x_desc, i, stage, ring, FORM)
