"""Gluon kernel of a linear for many tokens on Hopper: one warp copies, two or three groups of four warps compute.

A program computes tiles of the result one after another. As in hopper_linear_kernel, rows of the weight are the left
operand of the tensor-core products and tokens the right one. Blocks of eight rows of gate and of up alternate, so that
one thread holds both. A tile's tokens are split into up to three parts, each a power of two, which allows tiles of 144
and 192 tokens. While one group of warps writes its results, another still multiplies, and the next tile is copied.

Elements have 16 bits, or are 8-bit codes with scales, which are applied as in hopper_linear_kernel. With codes, a
tile's tokens are a single part, and its rows are multiplied 64 at a time: a product needs registers besides those of
the sums.
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

from compiled_engine.kernels.hopper_gate import BLOCK, gated, rows_of_pairs
from compiled_engine.kernels.hopper_linear_kernel import scaling_of
from compiled_engine.kernels.hopper_ring import (
    STEP_BYTES,
    barriers,
    load_box,
    next_stage,
    reinterpreted,
    shared_layout,
    stage_to_fill,
    step_of,
    store_box,
)
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING
from compiled_engine.kernels.launcher import quick_launches


class Form(NamedTuple):
    """Compile-time sizes and options of the kernel."""

    bits: Any  # of an element
    steps: Any  # steps along K
    groups: Any  # groups of warps that compute
    rows: Any  # of the weight, per group
    part0: Any  # tokens of each part; 0: none
    part1: Any
    part2: Any
    stages: Any
    gated: Any  # the weight holds gate and up
    together: Any  # token tiles that take the same rows one after another


class Descriptors(NamedTuple):
    """TMA descriptors of the weight, and of the inputs and results of each part of the tokens.

    Descriptors of missing parts are None. See hopper_product_kernel.
    """

    weight: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    results0: Any
    results1: Any
    results2: Any


class Stages(NamedTuple):
    """Ring buffer in shared memory. A stage holds the weight and tokens of one step along K, and has two barriers."""

    weight: Any  # [stages * groups, rows, STEP]
    tokens0: Any  # parts of the tokens, each [stages, part, STEP]
    tokens1: Any
    tokens2: Any
    full: Any  # barriers: the stage is filled
    empty: Any  # barriers: all groups of warps have finished with the stage


class Scales(NamedTuple):
    """Arguments of hopper_product_kernel that are needed to apply scales: pointers to the scales, and sizes."""

    of_weight_ptr: Any
    of_inputs_ptr: Any
    num_outputs: Any
    input_stride: Any  # input scales per row


class Tiles(NamedTuple):
    """The numbers of tiles into which the tokens and the rows of the weight are divided."""

    of_tokens: Any
    of_rows: Any


@gluon.constexpr_function
def form_of(bits: int, k: int, *numbers: Any) -> Form:
    columns = 64 if bits == 16 else 128  # see step_of
    return Form(bits, (k + columns - 1) // columns, *numbers)


@gluon.jit
def tile_at(number, tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (index of the tile of tokens, index of the tile of rows) for tile number `number` of the result.

    FORM.together tiles of tokens are multiplied by one tile of rows, then by the next, so that these tokens stay in the
    L2 cache.
    """
    many = FORM.together * tiles.of_rows
    first = number // many * FORM.together
    size = gl.minimum(tiles.of_tokens - first, FORM.together)
    within = number % many
    return first + within % size, within // size


@gluon.jit
def _load_weight(desc, row_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of a tile's weight rows into a stage: for each group of warps, the group's own rows.

    row_tile, step, stage: indices of the tile of rows, of the step along K and of the stage. With FORM.gated, blocks of
    gate and up alternate. The stage's barrier is told to expect the bytes of the step's tokens too, which _load_tokens
    copies.
    """
    groups: gl.constexpr = FORM.groups
    rows: gl.constexpr = FORM.rows
    blocks: gl.constexpr = rows // (2 * BLOCK)
    tokens: gl.constexpr = FORM.part0 + FORM.part1 + FORM.part2
    columns: gl.constexpr = step_of(FORM.bits)
    gated_shared: gl.constexpr = shared_layout(FORM.bits, 4)
    full = stages.full.index(stage)
    mbarrier.expect(full, (groups * rows + tokens) * STEP_BYTES)
    for i in gl.static_range(groups):
        group = row_tile * groups + i
        place = stages.weight.index(stage * groups + i)
        if FORM.gated:
            place = reinterpreted(place, [blocks, 2, BLOCK, columns], gated_shared)
            load_box(desc, [group * blocks, 0, 0, step * columns], full, place)
        else:
            load_box(desc, [group * rows, step * columns], full, place)


@gluon.jit
def _load_tokens(descs, token_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of a tile's tokens into a stage, part by part.

    token_tile, step, stage: indices of the tile of tokens, of the step along K and of the stage.
    """
    full = stages.full.index(stage)
    first = token_tile * (FORM.part0 + FORM.part1 + FORM.part2)
    column = step * step_of(FORM.bits)
    load_box(descs.tokens0, [first, column], full, stages.tokens0.index(stage))
    if FORM.part1 > 0:
        load_box(descs.tokens1, [first + FORM.part0, column], full, stages.tokens1.index(stage))
    if FORM.part2 > 0:
        load_box(descs.tokens2, [first + FORM.part0 + FORM.part1, column], full, stages.tokens2.index(stage))


@gluon.jit
def copy(descs, stages, tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run the copying warp: copy all steps of the program's tiles into the ring buffer, in order.

    The weight's first stages are copied before the wait for earlier kernels. The tokens, which an earlier kernel may
    have written, are copied after it.
    """
    number_of_stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(number_of_stages, FORM.steps)
    number = gl.program_id(0)
    token_tile, row_tile = tile_at(number, tiles, FORM)
    for i in range(ahead):
        _load_weight(descs.weight, row_tile, i, i, stages, FORM)
    gdc_wait()
    for i in range(ahead):
        _load_tokens(descs, token_tile, i, i, stages, FORM)
    count = ahead
    first_step = ahead
    while number < tiles.of_tokens * tiles.of_rows:
        token_tile, row_tile = tile_at(number, tiles, FORM)
        for step in range(first_step, FORM.steps):
            stage = stage_to_fill(stages.empty, count, number_of_stages)
            _load_weight(descs.weight, row_tile, step, stage, stages, FORM)
            _load_tokens(descs, token_tile, step, stage, stages, FORM)
            count += 1
        first_step = 0
        number += gl.num_programs(0)


# Registers per copying thread.
COPYING_REGISTERS = gl.constexpr(PRODUCT_COPYING)
# Most tokens of a part whose results have their own place in shared memory.
SMALL = gl.constexpr(32)


class Places(NamedTuple):
    """Shared memory through which results are written: for each part of the tokens [groups, tokens, outputs].

    Parts of more than SMALL tokens use the memory of the first part, one after another.
    """

    part0: Any
    part1: Any
    part2: Any


@gluon.constexpr_function
def chunk_of(rows: int, is_gated: bool) -> int:
    """Return the largest number of tokens whose results are written through shared memory at once.

    rows: rows of the weight per group of warps. is_gated: whether the weight holds gate and up.
    """
    return 64 if rows == 128 and not is_gated else 128


@gluon.jit
def _ended(acc, dtype: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the results, [outputs, tokens], for the sums acc, [rows, tokens].

    The results are activation(gate) * up if FORM.gated, otherwise the sums themselves.
    """
    tokens: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = FORM.rows
    if FORM.gated:
        gate, up = gl.split(acc.reshape([rows // (2 * BLOCK), 2, BLOCK, tokens]).permute((0, 2, 3, 1)))
        acc = gated(gate, up, dtype, ACTIVATION).reshape([rows // 2, tokens])
    return acc


@gluon.jit
def _write(y, desc, token, output, place):  # type: ignore[no-untyped-def]
    """Start to write y [outputs, tokens], transposed, to the results, beginning at (token, output).

    place: shared memory for y.
    """
    place.permute((1, 0)).store(y.to(place.dtype))
    fence_async_shared()
    store_box(desc, [token, output], place)


@gluon.jit
def write_all(  # type: ignore[no-untyped-def]
    acc0, acc1, acc2, descs, token, output, places, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GROUP: gl.constexpr
):
    """Write a group's results of a tile, one part of the tokens after another.

    acc0, acc1, acc2: the sums [rows, tokens] of each part. token, output: indices of the group's first token and first
    output.
    """
    dtype: gl.constexpr = places.part0.dtype
    part0: gl.constexpr = FORM.part0
    part1: gl.constexpr = FORM.part1
    part2: gl.constexpr = FORM.part2
    chunk: gl.constexpr = chunk_of(FORM.rows, FORM.gated)
    tma.store_wait(0)
    if part0 > chunk:
        left, right = gl.split(acc0.reshape([FORM.rows, 2, chunk]).permute((0, 2, 1)))
        _write(_ended(left, dtype, FORM, ACTIVATION), descs.results0, token, output, places.part0.index(GROUP))
        if not FORM.gated:
            tma.store_wait(0)
        _write(_ended(right, dtype, FORM, ACTIVATION), descs.results0, token + chunk, output, places.part1.index(GROUP))
    else:
        _write(_ended(acc0, dtype, FORM, ACTIVATION), descs.results0, token, output, places.part0.index(GROUP))
    if part1 > 0:
        if part1 > SMALL:
            tma.store_wait(0)
        place = places.part1.index(GROUP).slice(0, part1)
        _write(_ended(acc1, dtype, FORM, ACTIVATION), descs.results1, token + part0, output, place)
    if part2 > 0:
        if part2 > SMALL:
            tma.store_wait(0)
        place = places.part2.index(GROUP).slice(0, part2)
        _write(_ended(acc2, dtype, FORM, ACTIVATION), descs.results2, token + part0 + part1, output, place)


@gluon.jit
def _compute(descs, places, stages, tiles, FORM: gl.constexpr, ACTIVATION: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run a computing group of warps: for each tile, multiply the group's rows by the tile's tokens; write the results.

    places: shared memory for results. GROUP: index of this group. A stage is marked as empty once the products of the
    next step have been started.
    """
    part0: gl.constexpr = FORM.part0
    part1: gl.constexpr = FORM.part1
    part2: gl.constexpr = FORM.part2
    parts: gl.constexpr = 1 + (part1 > 0) + (part2 > 0)
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part0, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part1, 8), 16])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part2, 8), 16])
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), tiles.of_tokens * tiles.of_rows, gl.num_programs(0)):
        acc0 = gl.zeros([rows, part0], gl.float32, layout0)
        acc1 = gl.zeros([rows, max(part1, 8)], gl.float32, layout1)
        acc2 = gl.zeros([rows, max(part2, 8)], gl.float32, layout2)
        before = 0
        for step in range(FORM.steps):
            mbarrier.wait(stages.full.index(stage), phase)
            w = stages.weight.index(stage * FORM.groups + GROUP)
            acc0 = warpgroup_mma(w, stages.tokens0.index(stage).permute((1, 0)), acc0, is_async=True)
            if part1 > 0:
                acc1 = warpgroup_mma(w, stages.tokens1.index(stage).permute((1, 0)), acc1, is_async=True)
            if part2 > 0:
                acc2 = warpgroup_mma(w, stages.tokens2.index(stage).permute((1, 0)), acc2, is_async=True)
            if parts == 1:
                acc0 = warpgroup_mma_wait(parts, deps=(acc0,))
            elif parts == 2:
                acc0, acc1 = warpgroup_mma_wait(parts, deps=(acc0, acc1))
            else:
                acc0, acc1, acc2 = warpgroup_mma_wait(parts, deps=(acc0, acc1, acc2))
            if step > 0:
                mbarrier.arrive(stages.empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, FORM.stages)
        if parts == 1:
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
        elif parts == 2:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        else:
            acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
        mbarrier.arrive(stages.empty.index(before), count=1)
        token_tile, row_tile = tile_at(number, tiles, FORM)
        token = token_tile * (part0 + part1 + part2)
        output = (row_tile * FORM.groups + GROUP) * outputs
        write_all(acc0, acc1, acc2, descs, token, output, places, FORM, ACTIVATION, GROUP)
    tma.store_wait(0)


@gluon.jit
def _scales_of_rows(  # type: ignore[no-untyped-def]
    scales, first, block, layout: gl.constexpr, K: gl.constexpr, FORM: gl.constexpr, SCALING: gl.constexpr
):
    """Return the scales [64] of the weight's rows first to first + 63 in one block of 128 columns.

    With FORM.gated, rows are counted in the order in which blocks of gate and up alternate. `block` is ignored for
    scales that hold for all columns.
    """
    blocks: gl.constexpr = 1 if SCALING.columns == 0 else (K + 127) // 128
    row_N = first + gl.arange(0, 64, layout=layout)
    output_N = row_N
    if FORM.gated:
        output_N, row_N = rows_of_pairs(row_N, 0, scales.num_outputs)
    offset_N = row_N // SCALING.rows * blocks + (block if SCALING.columns > 0 else 0)
    return gl.load(scales.of_weight_ptr + offset_N, mask=output_N < scales.num_outputs, other=0.0)


@gluon.jit
def _scaled_product(  # type: ignore[no-untyped-def]
    acc, w, x, scales, first, token, block, K: gl.constexpr, FORM: gl.constexpr, SCALING: gl.constexpr
):
    """Return acc [64, tokens] plus the scaled product of 64 rows and the tile's tokens over one step along K.

    w, x: codes of the rows and of the tokens, in shared memory. first, token: indices of the first row and the first
    token. block: index of the step. The tokens' scales are loaded after the product: earlier, they would occupy
    registers that the product needs.
    """
    layout: gl.constexpr = acc.type.layout
    nothing = gl.zeros(acc.shape, gl.float32, layout)
    product = warpgroup_mma(w, x, nothing, use_acc=False, is_async=True)
    scale_N = _scales_of_rows(scales, first, block, gl.SliceLayout(1, layout), K, FORM, SCALING)
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
    stages,
    tiles,
    scales,
    K: gl.constexpr,
    FORM: gl.constexpr,
    SCALING: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Do the work of `_compute` for 8-bit codes: multiply each step's product by its scales before adding it."""
    tokens: gl.constexpr = FORM.part0
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    dtype: gl.constexpr = places.part0.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), tiles.of_tokens * tiles.of_rows, gl.num_programs(0)):
        token_tile, row_tile = tile_at(number, tiles, FORM)
        first = (row_tile * FORM.groups + GROUP) * rows
        token = token_tile * tokens
        acc0 = gl.zeros([64, tokens], gl.float32, layout)
        acc1 = gl.zeros([64, tokens], gl.float32, layout)
        for step in range(FORM.steps):
            mbarrier.wait(stages.full.index(stage), phase)
            w = stages.weight.index(stage * FORM.groups + GROUP)
            x = stages.tokens0.index(stage).permute((1, 0))
            acc0 = _scaled_product(acc0, w.slice(0, 64), x, scales, first, token, step, K, FORM, SCALING)
            if rows > 64:
                acc1 = _scaled_product(acc1, w.slice(64, 64), x, scales, first + 64, token, step, K, FORM, SCALING)
            mbarrier.arrive(stages.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, FORM.stages)
        tma.store_wait(0)
        output = (row_tile * FORM.groups + GROUP) * outputs
        half: gl.constexpr = outputs * 64 // rows
        _write(_ended64(acc0, dtype, FORM, ACTIVATION), descs.results0, token, output, places.part0.index(GROUP))
        if rows > 64:
            tma.store_wait(0)
            place = places.part0.index(GROUP)
            _write(_ended64(acc1, dtype, FORM, ACTIVATION), descs.results0, token, output + half, place)
    tma.store_wait(0)


@gluon.jit
def _ended64(acc, dtype: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the results, [outputs, tokens], for the sums acc of 64 rows, [64, tokens]; see `_ended`."""
    tokens: gl.constexpr = acc.shape[1]
    if FORM.gated:
        gate, up = gl.split(acc.reshape([64 // (2 * BLOCK), 2, BLOCK, tokens]).permute((0, 2, 3, 1)))
        acc = gated(gate, up, dtype, ACTIVATION).reshape([32, tokens])
    return acc


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
    scales_ptr=None,
    input_scales_ptr=None,
    input_stride=0,
    num_outputs=0,
    TILE_ROWS: gl.constexpr = 1,
    TILE_COLUMNS: gl.constexpr = 0,
    INPUT_COLUMNS: gl.constexpr = 0,
):
    """Compute a linear, y = x @ weight^T, or with GATED activation(gate) * up of the halves of y.

    Program p computes the tiles p, p + num_programs, ... of the result. A tile is GROUPS (2 or 3) times ROWS rows of
    the weight, and PART0 + PART1 + PART2 tokens. A step along K takes STEP columns: 64, or 128 of 8-bit codes.

    w_desc: TMA descriptor of the weight [N, K], with boxes [ROWS, STEP]. If GATED, of a view [N / 2 / BLOCK, 2, BLOCK,
        K], in which BLOCK (8) rows of gate and of up alternate, with boxes [ROWS / 2 / BLOCK, 2, BLOCK, STEP].
    x0_desc to x2_desc: TMA descriptors of x [T, K], with boxes [part, STEP], one per part; None for a part of size 0.
    y0_desc to y2_desc: TMA descriptors of the results [T, outputs], with boxes [part, outputs of a group of warps] of
        at most `chunk_of` tokens; None for a part of size 0. For codes, boxes of y0_desc have the outputs of 64 rows.
    token_tiles, row_tiles: number of tiles of tokens and of rows. STAGES: number of stages of the ring buffer.
        TOGETHER: number of tiles of tokens that are multiplied by the same rows one after another. REGISTERS: per
        computing thread.
    scales_ptr and the arguments after it: scales of 8-bit codes, see hopper_linear_kernel. With codes, PART1 and PART2
        are 0.
    """
    gdc_launch_dependents()
    element: gl.constexpr = w_desc.dtype
    BITS: gl.constexpr = element.primitive_bitwidth
    FORM: gl.constexpr = form_of(BITS, K, GROUPS, ROWS, PART0, PART1, PART2, STAGES, GATED, TOGETHER)
    SCALING: gl.constexpr = scaling_of(TILE_ROWS, TILE_COLUMNS, INPUT_COLUMNS)
    STEP: gl.constexpr = step_of(BITS)
    shared: gl.constexpr = shared_layout(BITS, 2)
    dtype: gl.constexpr = y0_desc.dtype
    rows: gl.constexpr = ROWS if BITS == 16 else 64
    outputs: gl.constexpr = rows // 2 if GATED else rows
    weight = gl.allocate_shared_memory(element, [STAGES * GROUPS, ROWS, STEP], shared)
    tokens0 = gl.allocate_shared_memory(element, [STAGES, PART0, STEP], shared)
    tokens1, tokens2 = tokens0, tokens0
    if PART1 > 0:
        tokens1 = gl.allocate_shared_memory(element, [STAGES, PART1, STEP], shared)
    if PART2 > 0:
        tokens2 = gl.allocate_shared_memory(element, [STAGES, PART2, STEP], shared)
    out_shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, outputs * 2), element_bitwidth=16, rank=2
    )
    chunk: gl.constexpr = chunk_of(ROWS, GATED) if BITS == 16 else PART0
    out0 = gl.allocate_shared_memory(dtype, [GROUPS, min(PART0, chunk), outputs], out_shared)
    out1, out2 = out0, out0
    if chunk < PART0 and GATED:
        out1 = gl.allocate_shared_memory(dtype, [GROUPS, chunk, outputs], out_shared)
    if PART1 > 0 and PART1 <= SMALL:
        out1 = gl.allocate_shared_memory(dtype, [GROUPS, PART1, outputs], out_shared)
    if PART2 > 0 and PART2 <= SMALL:
        out2 = gl.allocate_shared_memory(dtype, [GROUPS, PART2, outputs], out_shared)
    full, empty = barriers(STAGES, GROUPS)
    fence_async_shared()
    descs = Descriptors(w_desc, x0_desc, x1_desc, x2_desc, y0_desc, y1_desc, y2_desc)
    stages = Stages(weight, tokens0, tokens1, tokens2, full, empty)
    tiles = Tiles(token_tiles, row_tiles)
    places = Places(out0, out1, out2)
    scales = Scales(scales_ptr, input_scales_ptr, num_outputs, input_stride)
    # The arguments are written inline: a tuple in a variable would turn compile-time constants into runtime values.
    if BITS == 8:
        gl.warp_specialize(
            [
                (_compute_scaled, (descs, places, stages, tiles, scales, K, FORM, SCALING, ACTIVATION, 0)),
                (_compute_scaled, (descs, places, stages, tiles, scales, K, FORM, SCALING, ACTIVATION, 1)),
                (copy, (descs, stages, tiles, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (descs, places, stages, tiles, FORM, ACTIVATION, 0),
                ),
                (
                    _compute,
                    (descs, places, stages, tiles, FORM, ACTIVATION, 1),
                ),
                (copy, (descs, stages, tiles, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (descs, places, stages, tiles, FORM, ACTIVATION, 0),
                ),
                (
                    _compute,
                    (descs, places, stages, tiles, FORM, ACTIVATION, 1),
                ),
                (
                    _compute,
                    (descs, places, stages, tiles, FORM, ACTIVATION, 2),
                ),
                (copy, (descs, stages, tiles, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    gdc_wait()
