"""Gluon kernel of a linear for many tokens on Hopper: one warp copies, two or three groups of four warps compute.

Programs stay and take one tile after another. As in hopper_linear_kernel rows of the weight stand on the left of the
tensor cores' products, gate and up in turn by eights, and tokens on the right; there a tile is up to three parts, each a
power of two, so that tiles of 144 or 192 tokens exist. While a group ends its tile, the other still multiplies,
and the copies of the next tile are under way.
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
from compiled_engine.passes.hopper_linear_ending import gated
from compiled_engine.passes.hopper_linear_ring import BLOCK, BLOCKS_SHARED, SHARED, STEP, boxes_of, load_box

BOX_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
COPYING_REGISTERS = gl.constexpr(24)
# Tokens that pass through shared memory at a time, when results are written.
CHUNK = gl.constexpr(128)


class Form(NamedTuple):
    """What a kernel is compiled for: steps of K, groups of warps that compute, rows of the weight for each, parts of
    the tokens, stages, gate and up, token tiles that follow one another with the same rows of the weight."""

    steps: Any
    groups: Any
    rows: Any
    part0: Any
    part1: Any
    part2: Any
    stages: Any
    gated: Any
    together: Any


@gluon.constexpr_function
def form_of(k: int, *numbers: Any) -> Form:
    return Form((k + 63) // 64, *numbers)


class Ring(NamedTuple):
    weights: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    full: Any
    empty: Any


class Sources(NamedTuple):
    w: Any
    x0: Any
    x1: Any
    x2: Any


class Results(NamedTuple):
    whole: Any
    y1: Any
    y2: Any


@gluon.jit
def _tile(tile, token_tiles, row_tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which token tile and which rows: some token tiles together, so that they stay in the L2 cache."""
    many = FORM.together * row_tiles
    first = tile // many * FORM.together
    size = gl.minimum(token_tiles - first, FORM.together)
    within = tile % many
    return first + within % size, within // size


@gluon.jit
def _load_weight(w_desc, rows_at, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    groups: gl.constexpr = FORM.groups
    rows: gl.constexpr = FORM.rows
    blocks: gl.constexpr = rows // (2 * BLOCK)
    tokens: gl.constexpr = FORM.part0 + FORM.part1 + FORM.part2
    full = ring.full.index(stage)
    mbarrier.expect(full, (groups * rows + tokens) * STEP * 2)
    for i in gl.static_range(groups):
        group = rows_at * groups + i
        place = ring.weights.index(stage * groups + i)
        if FORM.gated:
            place = boxes_of(place, [blocks, 2, BLOCK, STEP], BOX_SHARED)
            load_box(w_desc, [group * blocks, 0, 0, step * STEP], full, place)
        else:
            load_box(w_desc, [group * rows, step * STEP], full, place)


@gluon.jit
def _load_tokens(x, first, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    full = ring.full.index(stage)
    load_box(x.x0, [first, step * STEP], full, ring.tokens0.index(stage))
    if FORM.part1 > 0:
        load_box(x.x1, [first + FORM.part0, step * STEP], full, ring.tokens1.index(stage))
    if FORM.part2 > 0:
        load_box(x.x2, [first + FORM.part0 + FORM.part1, step * STEP], full, ring.tokens2.index(stage))


@gluon.jit
def _copy(sources, ring, token_tiles, row_tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies: weights of the first stages before the wait for earlier kernels, the rest after it."""
    stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(stages, FORM.steps)
    tokens: gl.constexpr = FORM.part0 + FORM.part1 + FORM.part2
    tile = gl.program_id(0)
    token_tile, row_tile = _tile(tile, token_tiles, row_tiles, FORM)
    for i in range(ahead):
        _load_weight(sources.w, row_tile, i, i, ring, FORM)
    gdc_wait()
    for i in range(ahead):
        _load_tokens(sources, token_tile * tokens, i, i, ring, FORM)
    count = ahead
    first_step = ahead
    while tile < token_tiles * row_tiles:
        token_tile, row_tile = _tile(tile, token_tiles, row_tiles, FORM)
        for step in range(first_step, FORM.steps):
            stage = count % stages
            mbarrier.wait(ring.empty.index(stage), (count // stages) & 1 ^ 1)
            _load_weight(sources.w, row_tile, step, stage, ring, FORM)
            _load_tokens(sources, token_tile * tokens, step, stage, ring, FORM)
            count += 1
        first_step = 0
        tile += gl.num_programs(0)


@gluon.jit
def _halves(y):  # type: ignore[no-untyped-def]
    """[rows, tokens] -> its left and its right half."""
    rows: gl.constexpr = y.shape[0]
    half: gl.constexpr = y.shape[1] // 2
    return gl.split(y.reshape([rows, 2, half]).permute((0, 2, 1)))


@gluon.jit
def _write(y, desc, token, output, place):  # type: ignore[no-untyped-def]
    """[outputs, tokens], turned in shared memory."""
    place.permute((1, 0)).store(y.to(place.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [token, output], place)


@gluon.jit
def _ended(acc, dtype: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    if FORM.gated:
        tokens: gl.constexpr = acc.shape[1]
        rows: gl.constexpr = FORM.rows
        gate, up = gl.split(acc.reshape([rows // (2 * BLOCK), 2, BLOCK, tokens]).permute((0, 2, 3, 1)))
        y = gated(gate, up, dtype, ACTIVATION).reshape([rows // 2, tokens])
    else:
        y = acc
    return y


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    results, out0, out1, out2, ring, token_tiles, row_tiles, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GROUP: gl.constexpr
):
    stages: gl.constexpr = FORM.stages
    part0: gl.constexpr = FORM.part0
    part1: gl.constexpr = FORM.part1
    part2: gl.constexpr = FORM.part2
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    parts: gl.constexpr = 1 + (part1 > 0) + (part2 > 0)
    dtype: gl.constexpr = ring.weights.dtype
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part0, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part1, 8), 16])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part2, 8), 16])
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), token_tiles * row_tiles, gl.num_programs(0)):
        acc0 = gl.zeros([rows, part0], gl.float32, layout0)
        if part1 > 0:
            acc1 = gl.zeros([rows, part1], gl.float32, layout1)
        if part2 > 0:
            acc2 = gl.zeros([rows, part2], gl.float32, layout2)
        before = 0
        for step in range(FORM.steps):
            mbarrier.wait(ring.full.index(stage), phase)
            w = ring.weights.index(stage * FORM.groups + GROUP)
            acc0 = warpgroup_mma(w, ring.tokens0.index(stage).permute((1, 0)), acc0, is_async=True)
            if part1 > 0:
                acc1 = warpgroup_mma(w, ring.tokens1.index(stage).permute((1, 0)), acc1, is_async=True)
            if part2 > 0:
                acc2 = warpgroup_mma(w, ring.tokens2.index(stage).permute((1, 0)), acc2, is_async=True)
            if parts == 1:
                acc0 = warpgroup_mma_wait(parts, deps=(acc0,))
            elif parts == 2:
                acc0, acc1 = warpgroup_mma_wait(parts, deps=(acc0, acc1))
            else:
                acc0, acc1, acc2 = warpgroup_mma_wait(parts, deps=(acc0, acc1, acc2))
            if step > 0:
                mbarrier.arrive(ring.empty.index(before), count=1)
            before = stage
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1
        if parts == 1:
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
        elif parts == 2:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        else:
            acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
        mbarrier.arrive(ring.empty.index(before), count=1)
        token_tile, row_tile = _tile(tile, token_tiles, row_tiles, FORM)
        token = token_tile * (part0 + part1 + part2)
        output = (row_tile * FORM.groups + GROUP) * outputs
        tma.store_wait(0)
        if part0 > CHUNK:
            left, right = _halves(acc0)
            _write(_ended(left, dtype, FORM, ACTIVATION), results.whole, token, output, out0)
            if not FORM.gated:
                tma.store_wait(0)
            _write(_ended(right, dtype, FORM, ACTIVATION), results.whole, token + CHUNK, output, out1)
        else:
            _write(_ended(acc0, dtype, FORM, ACTIVATION), results.whole, token, output, out0)
        if part1 > 0:
            if part1 > 32:
                tma.store_wait(0)
            _write(_ended(acc1, dtype, FORM, ACTIVATION), results.y1, token + part0, output, out1.slice(0, part1))
        if part2 > 0:
            if part2 > 32:
                tma.store_wait(0)
            _write(_ended(acc2, dtype, FORM, ACTIVATION), results.y2, token + part0 + part1, output, out2.slice(0, part2))
    tma.store_wait(0)


@quick_launches
@gluon.jit(do_not_specialize=["token_tiles"])
def hopper_product_kernel(  # type: ignore[no-untyped-def]
    w_desc,
    x0_desc,
    x1_desc,
    x2_desc,
    y0_desc,
    y1_desc,
    y2_desc,
    token_tiles,
    row_tiles,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    PART0: gl.constexpr,
    PART1: gl.constexpr,
    PART2: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    gdc_launch_dependents()
    FORM: gl.constexpr = form_of(K, GROUPS, ROWS, PART0, PART1, PART2, STAGES, GATED, TOGETHER)
    dtype: gl.constexpr = w_desc.dtype
    outputs: gl.constexpr = ROWS // 2 if GATED else ROWS
    chunk: gl.constexpr = min(PART0, CHUNK)
    second: gl.constexpr = PART1 if PART1 > 0 else CHUNK
    out_shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, outputs * 2), element_bitwidth=16, rank=2
    )
    weights = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, STEP], SHARED)
    tokens0 = gl.allocate_shared_memory(dtype, [STAGES, PART0, STEP], SHARED)
    tokens1 = tokens0
    if PART1 > 0:
        tokens1 = gl.allocate_shared_memory(dtype, [STAGES, PART1, STEP], SHARED)
    tokens2 = tokens0
    if PART2 > 0:
        tokens2 = gl.allocate_shared_memory(dtype, [STAGES, PART2, STEP], SHARED)
    out0 = gl.allocate_shared_memory(dtype, [GROUPS, chunk, outputs], out_shared)
    # A large part takes the place of the first, as soon as that has left it.
    out1 = out0
    if (PART1 > 0 and PART1 <= 32) or (PART0 > CHUNK and GATED):
        out1 = gl.allocate_shared_memory(dtype, [GROUPS, second, outputs], out_shared)
    out2 = out0
    if PART2 > 0 and PART2 <= 32:
        out2 = gl.allocate_shared_memory(dtype, [GROUPS, PART2, outputs], out_shared)
    ring = Ring(
        weights,
        tokens0,
        tokens1,
        tokens2,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
    fence_async_shared()
    sources = Sources(w_desc, x0_desc, x1_desc, x2_desc)
    results = Results(y0_desc, y1_desc, y2_desc)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (results, out0.index(0), out1.index(0), out2.index(0), ring, token_tiles, row_tiles, FORM, ACTIVATION, 0)),
                (_compute, (results, out0.index(1), out1.index(1), out2.index(1), ring, token_tiles, row_tiles, FORM, ACTIVATION, 1)),
                (_copy, (sources, ring, token_tiles, row_tiles, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (results, out0.index(0), out1.index(0), out2.index(0), ring, token_tiles, row_tiles, FORM, ACTIVATION, 0)),
                (_compute, (results, out0.index(1), out1.index(1), out2.index(1), ring, token_tiles, row_tiles, FORM, ACTIVATION, 1)),
                (_compute, (results, out0.index(2), out1.index(2), out2.index(2), ring, token_tiles, row_tiles, FORM, ACTIVATION, 2)),
                (_copy, (sources, ring, token_tiles, row_tiles, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    gdc_wait()
