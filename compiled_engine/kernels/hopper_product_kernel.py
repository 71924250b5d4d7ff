"""Gluon kernel of a linear for many tokens on Hopper: two warps copy, two or three groups of four warps compute.

A program takes one tile after another. As in hopper_linear_kernel, rows of the weight stand on the left of the tensor
cores' products, eight rows of gate and their eight of up in turn, so that one thread holds both, and tokens on the
right. A tile's tokens come in up to three parts, each a power of two: there are tiles of 144 and of 192 tokens. While
one group of warps ends its tile another still multiplies, and the next tile is copied.

One warp copies the weight, the other the tokens, each into its own ring of stages. The weight does not wait for earlier
kernels, and has more stages where shared memory is left.

Elements have 16 bits, or are 8-bit codes with scales, which are applied as in hopper_linear_kernel; then tokens come in
one part, since their product takes registers in addition to the sums.
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

from compiled_engine.kernels.hopper_linear_kernel import (
    BLOCK,
    STEP_BYTES,
    boxes_of,
    gated,
    load_box,
    scaling_of,
    shared_layout,
    step_of,
    store_box,
)
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING
from compiled_engine.kernels.launcher import quick_launches


class Form(NamedTuple):
    """The constants of a compiled kernel: bits of an element, groups of warps that compute, rows of the weight for
    each, parts of the tokens (0: none), stages of the weight and of the tokens, gate and up, token tiles that take the
    same rows one after another, places of a group for results in shared memory, and tokens of a place."""

    bits: Any
    groups: Any
    rows: Any
    part0: Any
    part1: Any
    part2: Any
    weight_stages: Any
    token_stages: Any
    gated: Any
    together: Any
    places: Any
    chunk: Any


class Descriptors(NamedTuple):
    """Descriptors of the weight, and of a tile's tokens and results by parts."""

    weight: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    results0: Any
    results1: Any
    results2: Any


class Rings(NamedTuple):
    """Stages of the weight, [stages * groups, rows, STEP], and of the parts of the tokens, [stages, part, STEP]; for
    each stage the barriers that say that it is full, and that all groups of warps have done with it."""

    weight: Any
    weight_full: Any
    weight_empty: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    tokens_full: Any
    tokens_empty: Any


class Scales(NamedTuple):
    """The scales of codes, the number of outputs, and that of input scales in a row; see hopper_product_kernel."""

    of_weight_ptr: Any
    of_inputs_ptr: Any
    num_outputs: Any
    input_stride: Any


class Work(NamedTuple):
    """The number of tiles, and of steps of K."""

    of_tokens: Any
    of_rows: Any
    steps: Any


@gluon.constexpr_function
def form_of(*numbers: Any) -> Form:
    return Form(*numbers)


@gluon.jit
def tile_at(number, work, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's tokens and rows. Groups of token tiles run over all rows together, so that they stay in the L2 cache."""
    many = FORM.together * work.of_rows
    first = number // many * FORM.together
    size = gl.minimum(work.of_tokens - first, FORM.together)
    within = number % many
    return first + within % size, within // size


@gluon.jit
def copy_weight(desc, rings, work, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies each group's rows, in blocks of gate and of up if it is gated."""
    groups: gl.constexpr = FORM.groups
    rows: gl.constexpr = FORM.rows
    blocks: gl.constexpr = rows // (2 * BLOCK)
    columns: gl.constexpr = step_of(FORM.bits)
    gated_shared: gl.constexpr = shared_layout(FORM.bits, 4)
    stage = 0
    phase = 1
    for number in range(gl.program_id(0), work.of_tokens * work.of_rows, gl.num_programs(0)):
        _, row_tile = tile_at(number, work, FORM)
        for step in range(work.steps):
            mbarrier.wait(rings.weight_empty.index(stage), phase)
            full = rings.weight_full.index(stage)
            mbarrier.expect(full, groups * rows * STEP_BYTES)
            for i in gl.static_range(groups):
                group = row_tile * groups + i
                place = rings.weight.index(stage * groups + i)
                if FORM.gated:
                    place = boxes_of(place, [blocks, 2, BLOCK, columns], gated_shared)
                    load_box(desc, [group * blocks, 0, 0, step * columns], full, place)
                else:
                    load_box(desc, [group * rows, step * columns], full, place)
            stage += 1
            if stage == FORM.weight_stages:
                stage = 0
                phase ^= 1


@gluon.jit
def copy_tokens(descs, rings, work, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies tokens, which earlier kernels write."""
    columns: gl.constexpr = step_of(FORM.bits)
    tokens: gl.constexpr = FORM.part0 + FORM.part1 + FORM.part2
    stage = 0
    phase = 1
    gdc_wait()
    for number in range(gl.program_id(0), work.of_tokens * work.of_rows, gl.num_programs(0)):
        token_tile, _ = tile_at(number, work, FORM)
        first = token_tile * tokens
        for step in range(work.steps):
            mbarrier.wait(rings.tokens_empty.index(stage), phase)
            full = rings.tokens_full.index(stage)
            mbarrier.expect(full, tokens * STEP_BYTES)
            column = step * columns
            load_box(descs.tokens0, [first, column], full, rings.tokens0.index(stage))
            if FORM.part1 > 0:
                load_box(descs.tokens1, [first + FORM.part0, column], full, rings.tokens1.index(stage))
            if FORM.part2 > 0:
                load_box(descs.tokens2, [first + FORM.part0 + FORM.part1, column], full, rings.tokens2.index(stage))
            stage += 1
            if stage == FORM.token_stages:
                stage = 0
                phase ^= 1


# Registers of a thread that copies.
COPYING_REGISTERS = gl.constexpr(PRODUCT_COPYING)


@gluon.constexpr_function
def chunks_of(tokens: int, chunk: int) -> int:
    """The number of places that results of this many tokens take."""
    return (tokens + chunk - 1) // chunk


@gluon.jit
def _write(  # type: ignore[no-untyped-def]
    acc,
    desc,
    token,
    output,
    places,
    FORM: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """End [rows, tokens] and write [tokens, outputs], which shared memory turns, in halves of what a place does not
    hold. CHUNK: the number of chunks of the tile before this one; the group's places take turns."""
    rows: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = places.dtype
    if tokens > FORM.chunk:
        half: gl.constexpr = tokens // 2
        left, right = gl.split(acc.reshape([rows, 2, half]).permute((0, 2, 1)))
        after: gl.constexpr = CHUNK + chunks_of(half, FORM.chunk)
        _write(left, desc, token, output, places, FORM, ACTIVATION, GROUP, CHUNK)
        _write(right, desc, token + half, output, places, FORM, ACTIVATION, GROUP, after)
    else:
        if FORM.gated:
            gate, up = gl.split(acc.reshape([rows // (2 * BLOCK), 2, BLOCK, tokens]).permute((0, 2, 3, 1)))
            acc = gated(gate, up, dtype, ACTIVATION).reshape([rows // 2, tokens])
        tma.store_wait(FORM.places - 1)
        place = places.index(GROUP * FORM.places + CHUNK % FORM.places)
        if tokens < FORM.chunk:
            place = place.slice(0, tokens)
        place.permute((1, 0)).store(acc.to(dtype))
        fence_async_shared()
        store_box(desc, [token, output], place)


@gluon.jit
def _waited(acc0, acc1, acc2, PENDING: gl.constexpr, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of the parts, when all but PENDING products have ended."""
    if FORM.part1 == 0:
        acc0 = warpgroup_mma_wait(PENDING, deps=(acc0,))
    elif FORM.part2 == 0:
        acc0, acc1 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1))
    else:
        acc0, acc1, acc2 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1, acc2))
    return acc0, acc1, acc2


@gluon.jit
def _compute(descs, places, rings, work, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """A group of warps: its rows of the weight times a tile's tokens. A stage is given back when the products of the
    next one are under way."""
    part0: gl.constexpr = FORM.part0
    part1: gl.constexpr = FORM.part1
    part2: gl.constexpr = FORM.part2
    parts: gl.constexpr = 1 + (part1 > 0) + (part2 > 0)
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part0, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part1, 8), 16])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part2, 8), 16])
    ws = 0
    w_phase = 0
    xs = 0
    x_phase = 0
    for number in range(gl.program_id(0), work.of_tokens * work.of_rows, gl.num_programs(0)):
        acc0 = gl.zeros([rows, part0], gl.float32, layout0)
        acc1 = gl.zeros([rows, max(part1, 8)], gl.float32, layout1)
        acc2 = gl.zeros([rows, max(part2, 8)], gl.float32, layout2)
        w_before = 0
        x_before = 0
        for step in range(work.steps):
            mbarrier.wait(rings.weight_full.index(ws), w_phase)
            mbarrier.wait(rings.tokens_full.index(xs), x_phase)
            w = rings.weight.index(ws * FORM.groups + GROUP)
            acc0 = warpgroup_mma(w, rings.tokens0.index(xs).permute((1, 0)), acc0, is_async=True)
            if part1 > 0:
                acc1 = warpgroup_mma(w, rings.tokens1.index(xs).permute((1, 0)), acc1, is_async=True)
            if part2 > 0:
                acc2 = warpgroup_mma(w, rings.tokens2.index(xs).permute((1, 0)), acc2, is_async=True)
            acc0, acc1, acc2 = _waited(acc0, acc1, acc2, parts, FORM)
            if step > 0:
                mbarrier.arrive(rings.weight_empty.index(w_before), count=1)
                mbarrier.arrive(rings.tokens_empty.index(x_before), count=1)
            w_before = ws
            x_before = xs
            ws += 1
            if ws == FORM.weight_stages:
                ws = 0
                w_phase ^= 1
            xs += 1
            if xs == FORM.token_stages:
                xs = 0
                x_phase ^= 1
        acc0, acc1, acc2 = _waited(acc0, acc1, acc2, 0, FORM)
        mbarrier.arrive(rings.weight_empty.index(w_before), count=1)
        mbarrier.arrive(rings.tokens_empty.index(x_before), count=1)
        token_tile, row_tile = tile_at(number, work, FORM)
        token = token_tile * (part0 + part1 + part2)
        output = (row_tile * FORM.groups + GROUP) * outputs
        tma.store_wait(0)
        after0: gl.constexpr = chunks_of(part0, FORM.chunk)
        after1: gl.constexpr = after0 + chunks_of(part1, FORM.chunk)
        _write(acc0, descs.results0, token, output, places, FORM, ACTIVATION, GROUP, 0)
        if part1 > 0:
            _write(acc1, descs.results1, token + part0, output, places, FORM, ACTIVATION, GROUP, after0)
        if part2 > 0:
            _write(acc2, descs.results2, token + part0 + part1, output, places, FORM, ACTIVATION, GROUP, after1)
    tma.store_wait(0)


@gluon.jit
def _scales_of_rows(  # type: ignore[no-untyped-def]
    scales, first, block, steps, layout: gl.constexpr, FORM: gl.constexpr, SCALING: gl.constexpr
):
    """[rows]: of the weight's rows from the first one on, in a block of 128 columns, which is a step."""
    row_N = first + gl.arange(0, FORM.rows, layout=layout)
    output_N = row_N
    if FORM.gated:
        output_N = row_N // (2 * BLOCK) * BLOCK + row_N % BLOCK
        row_N = output_N + row_N // BLOCK % 2 * scales.num_outputs
    offset_N = row_N // SCALING.rows
    if SCALING.columns > 0:
        offset_N = offset_N * steps + block
    return gl.load(scales.of_weight_ptr + offset_N, mask=output_N < scales.num_outputs, other=0.0)


@gluon.jit
def _scaled_product(  # type: ignore[no-untyped-def]
    acc, w, x, scales, first, token, block, steps, FORM: gl.constexpr, SCALING: gl.constexpr
):
    """acc plus the product of rows and tokens, times its scales. Those of the tokens are read when it is there: before,
    they would take registers from it."""
    layout: gl.constexpr = acc.type.layout
    nothing = gl.zeros(acc.shape, gl.float32, layout)
    product = warpgroup_mma(w, x, nothing, use_acc=False, is_async=True)
    scale_N = _scales_of_rows(scales, first, block, steps, gl.SliceLayout(1, layout), FORM, SCALING)
    product = warpgroup_mma_wait(0, deps=(product,))
    token_T = token + gl.arange(0, FORM.part0, layout=gl.SliceLayout(0, layout))
    if SCALING.input_columns > 0:
        token_T += block * scales.input_stride
    scale_T = gl.load(scales.of_inputs_ptr + token_T)
    return acc + product * (scale_N[:, None] * scale_T[None, :])


@gluon.jit
def _compute_scaled(  # type: ignore[no-untyped-def]
    descs,
    places,
    rings,
    work,
    scales,
    FORM: gl.constexpr,
    SCALING: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A group of warps: its rows of codes times a tile's codes of tokens."""
    tokens: gl.constexpr = FORM.part0
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])
    ws = 0
    w_phase = 0
    xs = 0
    x_phase = 0
    for number in range(gl.program_id(0), work.of_tokens * work.of_rows, gl.num_programs(0)):
        token_tile, row_tile = tile_at(number, work, FORM)
        first = (row_tile * FORM.groups + GROUP) * rows
        token = token_tile * tokens
        acc = gl.zeros([rows, tokens], gl.float32, layout)
        for step in range(work.steps):
            mbarrier.wait(rings.weight_full.index(ws), w_phase)
            mbarrier.wait(rings.tokens_full.index(xs), x_phase)
            w = rings.weight.index(ws * FORM.groups + GROUP)
            x = rings.tokens0.index(xs).permute((1, 0))
            acc = _scaled_product(acc, w, x, scales, first, token, step, work.steps, FORM, SCALING)
            mbarrier.arrive(rings.weight_empty.index(ws), count=1)
            mbarrier.arrive(rings.tokens_empty.index(xs), count=1)
            ws += 1
            if ws == FORM.weight_stages:
                ws = 0
                w_phase ^= 1
            xs += 1
            if xs == FORM.token_stages:
                xs = 0
                x_phase ^= 1
        tma.store_wait(0)
        output = (row_tile * FORM.groups + GROUP) * outputs
        _write(acc, descs.results0, token, output, places, FORM, ACTIVATION, GROUP, 0)
    tma.store_wait(0)


@quick_launches
@gluon.jit(do_not_specialize=["token_tiles", "row_tiles", "steps"])
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
    steps,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    PART0: gl.constexpr,
    PART1: gl.constexpr,
    PART2: gl.constexpr,
    WEIGHT_STAGES: gl.constexpr,
    TOKEN_STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOGETHER: gl.constexpr,
    PLACES: gl.constexpr,
    CHUNK: gl.constexpr,
    REGISTERS: gl.constexpr,
    scales_ptr=None,
    input_scales_ptr=None,
    input_stride=0,
    num_outputs=0,
    TILE_ROWS: gl.constexpr = 1,
    TILE_COLUMNS: gl.constexpr = 0,
    INPUT_COLUMNS: gl.constexpr = 0,
):
    """Program: every num_programs-th tile of GROUPS (2 or 3) times ROWS rows of the weight and PART0 + PART1 + PART2
    tokens.

    w_desc: of the weight, [N, K] in boxes of [ROWS, STEP], or, GATED, [N / 2 / BLOCK, 2, BLOCK, K] in boxes of
    [ROWS / 2 / BLOCK, 2, BLOCK, STEP]. x0_desc to x2_desc: of x, [T, K] in boxes of [part, STEP]. y0_desc to y2_desc:
    of the results, [T, outputs] in boxes of [part, outputs of a group], of CHUNK tokens at most. None for parts that
    are 0. steps: of K. REGISTERS: of a thread that computes. STEP is 64 columns, and 128 for codes of 8 bits, whose
    scales are as in hopper_linear_kernel; they have two groups of 64 rows and one part.
    """
    gdc_launch_dependents()
    element: gl.constexpr = w_desc.dtype
    BITS: gl.constexpr = element.primitive_bitwidth
    FORM: gl.constexpr = form_of(
        BITS, GROUPS, ROWS, PART0, PART1, PART2, WEIGHT_STAGES, TOKEN_STAGES, GATED, TOGETHER, PLACES, CHUNK
    )
    SCALING: gl.constexpr = scaling_of(TILE_ROWS, TILE_COLUMNS, INPUT_COLUMNS)
    STEP: gl.constexpr = step_of(BITS)
    shared: gl.constexpr = shared_layout(BITS, 2)
    outputs: gl.constexpr = ROWS // 2 if GATED else ROWS
    weight = gl.allocate_shared_memory(element, [WEIGHT_STAGES * GROUPS, ROWS, STEP], shared)
    tokens0 = gl.allocate_shared_memory(element, [TOKEN_STAGES, PART0, STEP], shared)
    tokens1, tokens2 = tokens0, tokens0
    if PART1 > 0:
        tokens1 = gl.allocate_shared_memory(element, [TOKEN_STAGES, PART1, STEP], shared)
    if PART2 > 0:
        tokens2 = gl.allocate_shared_memory(element, [TOKEN_STAGES, PART2, STEP], shared)
    out_shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, outputs * 2), element_bitwidth=16, rank=2
    )
    places = gl.allocate_shared_memory(y0_desc.dtype, [GROUPS * PLACES, CHUNK, outputs], out_shared)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    weight_full = gl.allocate_shared_memory(gl.int64, [WEIGHT_STAGES, 1], barriers)
    weight_empty = gl.allocate_shared_memory(gl.int64, [WEIGHT_STAGES, 1], barriers)
    tokens_full = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], barriers)
    tokens_empty = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], barriers)
    for stage in gl.static_range(WEIGHT_STAGES):
        mbarrier.init(weight_full.index(stage), count=1)
        mbarrier.init(weight_empty.index(stage), count=GROUPS)
    for stage in gl.static_range(TOKEN_STAGES):
        mbarrier.init(tokens_full.index(stage), count=1)
        mbarrier.init(tokens_empty.index(stage), count=GROUPS)
    fence_async_shared()
    descs = Descriptors(w_desc, x0_desc, x1_desc, x2_desc, y0_desc, y1_desc, y2_desc)
    rings = Rings(weight, weight_full, weight_empty, tokens0, tokens1, tokens2, tokens_full, tokens_empty)
    work = Work(token_tiles, row_tiles, steps)
    scales = Scales(scales_ptr, input_scales_ptr, num_outputs, input_stride)
    # A tuple that is kept in a variable would turn what is known at compile time into values.
    if BITS == 8:
        gl.warp_specialize(
            [
                (_compute_scaled, (descs, places, rings, work, scales, FORM, SCALING, ACTIVATION, 0)),
                (_compute_scaled, (descs, places, rings, work, scales, FORM, SCALING, ACTIVATION, 1)),
                (copy_weight, (w_desc, rings, work, FORM)),
                (copy_tokens, (descs, rings, work, FORM)),
            ],
            [4, 1, 1],
            [REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (descs, places, rings, work, FORM, ACTIVATION, 0)),
                (_compute, (descs, places, rings, work, FORM, ACTIVATION, 1)),
                (copy_weight, (w_desc, rings, work, FORM)),
                (copy_tokens, (descs, rings, work, FORM)),
            ],
            [4, 1, 1],
            [REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (descs, places, rings, work, FORM, ACTIVATION, 0)),
                (_compute, (descs, places, rings, work, FORM, ACTIVATION, 1)),
                (_compute, (descs, places, rings, work, FORM, ACTIVATION, 2)),
                (copy_weight, (w_desc, rings, work, FORM)),
                (copy_tokens, (descs, rings, work, FORM)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
        )
    gdc_wait()
