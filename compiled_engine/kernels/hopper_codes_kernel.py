"""Gluon kernel of a linear with 8-bit codes for many tokens on Hopper: one warp copies, two groups of warps compute.

Codes are quantised values: a value is its code times the scale of its tile.

Unlike in hopper_product_kernel, tokens are the left operand of the tensor-core instruction, and rows of the weight the
right one. Each thread then holds results of two tokens. For a product over 128 columns a thread needs the scales of
these two tokens and, if all rows of the product share a scale, one scale of the weight. If the weight holds gate and
up, whose rows are interleaved in blocks of eight, a thread needs two scales of the weight.

Each group of four warps handles 64 or 128 tokens. The tensor cores accumulate products of codes with fewer bits than
fp32, so they multiply 128 columns at a time, and ordinary instructions add the product to the sums in fp32.

Adding up products outside the tensor cores, and tiles of 256 tokens by 128 rows, are methods of DeepGEMM.
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
from compiled_engine.kernels.hopper_product_kernel import COPYING_REGISTERS, Tiles, tile_at
from compiled_engine.kernels.hopper_ring import (
    STEP_BYTES,
    barriers,
    load_box,
    next_stage,
    reinterpreted,
    shared_layout,
    stage_to_fill,
    store_box,
)
from compiled_engine.kernels.launcher import quick_launches

# Columns per step, tokens per product, and groups of warps that compute.
STEP = gl.constexpr(128)
TOKENS = gl.constexpr(64)
GROUPS = gl.constexpr(2)


class Form(NamedTuple):
    """Compile-time sizes and options of the kernel."""

    steps: Any  # steps along K
    tokens: Any  # per group of warps
    rows: Any  # of the weight, gate and up counted together
    stages: Any
    gated: Any  # the weight holds gate and up
    together: Any  # token tiles that take the same rows one after another


class Stages(NamedTuple):
    """Ring buffer in shared memory. A stage holds the weight and tokens of one step along K, and has two barriers."""

    weight: Any  # [stages, rows, STEP]
    tokens: Any  # [stages * GROUPS, tokens, STEP]
    full: Any  # barriers: the stage is filled
    empty: Any  # barriers: both groups of warps have finished with the stage


class Scales(NamedTuple):
    """Arguments of hopper_codes_kernel that are needed to apply scales: pointers to the scales, and sizes."""

    of_weight_ptr: Any
    of_inputs_ptr: Any
    input_stride: Any  # input scales per row
    num_tokens: Any
    num_outputs: Any


class Tiling(NamedTuple):
    """Sizes of the weight's quantisation tiles, whose codes share a scale."""

    rows: Any
    by_step: Any  # tiles, also those of inputs, are 128 columns wide; otherwise whole rows


@gluon.constexpr_function
def form_of(k: int, *numbers: Any) -> Form:
    return Form((k + 127) // 128, *numbers)


@gluon.constexpr_function
def tiling_of(rows: int, columns: int) -> Tiling:
    return Tiling(rows, columns > 0)


@gluon.jit
def _load_weight(desc, row_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of a tile's weight rows into a stage. With FORM.gated, blocks of gate and up alternate.

    row_tile, step, stage: indices of the tile of rows, of the step along K and of the stage. The stage's barrier is
    told to expect the bytes of the step's tokens too, which _load_tokens copies.
    """
    blocks: gl.constexpr = FORM.rows // (2 * BLOCK)
    gated_shared: gl.constexpr = shared_layout(8, 4)
    full = stages.full.index(stage)
    mbarrier.expect(full, (FORM.rows + GROUPS * FORM.tokens) * STEP_BYTES)
    place = stages.weight.index(stage)
    if FORM.gated:
        place = reinterpreted(place, [blocks, 2, BLOCK, STEP], gated_shared)
        load_box(desc, [row_tile * blocks, 0, 0, step * STEP], full, place)
    else:
        load_box(desc, [row_tile * FORM.rows, step * STEP], full, place)


@gluon.jit
def _load_tokens(desc, token_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of a tile's tokens into a stage: for each group of warps, the group's own tokens.

    token_tile, step, stage: indices of the tile of tokens, of the step along K and of the stage.
    """
    full = stages.full.index(stage)
    for i in gl.static_range(GROUPS):
        first = (token_tile * GROUPS + i) * FORM.tokens
        load_box(desc, [first, step * STEP], full, stages.tokens.index(stage * GROUPS + i))


@gluon.jit
def copy(w_desc, x_desc, stages, tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run the copying warp: copy all steps of the program's tiles into the ring buffer, in order.

    The weight's first stages are copied before the wait for earlier kernels. The tokens, which an earlier kernel may
    have written, are copied after it. w_desc, x_desc: see hopper_codes_kernel.
    """
    number_of_stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(number_of_stages, FORM.steps)
    number = gl.program_id(0)
    token_tile, row_tile = tile_at(number, tiles, FORM)
    for i in range(ahead):
        _load_weight(w_desc, row_tile, i, i, stages, FORM)
    gdc_wait()
    for i in range(ahead):
        _load_tokens(x_desc, token_tile, i, i, stages, FORM)
    count = ahead
    first_step = ahead
    while number < tiles.of_tokens * tiles.of_rows:
        token_tile, row_tile = tile_at(number, tiles, FORM)
        for step in range(first_step, FORM.steps):
            stage = stage_to_fill(stages.empty, count, number_of_stages)
            _load_weight(w_desc, row_tile, step, stage, stages, FORM)
            _load_tokens(x_desc, token_tile, step, stage, stages, FORM)
            count += 1
        first_step = 0
        number += gl.num_programs(0)


@gluon.jit
def _scales_of_step(  # type: ignore[no-untyped-def]
    scales, first, step, layout: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr
):
    """Return the weight's scale for each row of a tile in one step along K, [rows].

    The rows lie in one quantisation tile, so their scales are equal. If the weight holds gate and up, the rows of gate
    have one scale and the rows of up another. first: index of the first output.
    """
    row_N = gl.arange(0, FORM.rows, layout=layout)
    if FORM.gated:
        gate = gl.load(scales.of_weight_ptr + first // TILING.rows * FORM.steps + step)
        up = gl.load(scales.of_weight_ptr + (scales.num_outputs + first) // TILING.rows * FORM.steps + step)
        return gl.where(row_N // BLOCK % 2 == 0, gate, up)
    else:
        one = gl.load(scales.of_weight_ptr + first // TILING.rows * FORM.steps + step)
        return gl.where(row_N >= 0, one, one)


@gluon.jit
def _scales_of_rows(  # type: ignore[no-untyped-def]
    scales, first, layout: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr
):
    """Return the weight's scale of each row of a tile, [rows]. Each scale holds for all columns of a row.

    first: index of the tile's first output.
    """
    row_N = gl.arange(0, FORM.rows, layout=layout)
    output_N = first + row_N
    row_N = output_N
    if FORM.gated:
        output_N, row_N = rows_of_pairs(output_N - first, first, scales.num_outputs)
    return gl.load(scales.of_weight_ptr + row_N // TILING.rows, mask=output_N < scales.num_outputs, other=0.0)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    acc, x, w, scales, token, first, step, FORM: gl.constexpr, TILING: gl.constexpr
):
    """Return acc [64, rows] plus the product of 64 tokens and a tile's rows over one step along K.

    x, w: codes of the tokens, [64, STEP], and of the rows, [STEP, rows], in shared memory. If each step has scales of
    its own (TILING.by_step), the product is multiplied by them; they are loaded while the tensor cores compute. token,
    first: indices of the first token and the first output.
    """
    layout: gl.constexpr = acc.type.layout
    nothing = gl.zeros(acc.shape, gl.float32, layout)
    product = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
    if TILING.by_step:
        token_T = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
        scale_ptr_T = scales.of_inputs_ptr + step * scales.input_stride + token_T
        scale_T = gl.load(scale_ptr_T, mask=token_T < scales.num_tokens, other=0.0)
        if FORM.gated:
            scale_N = _scales_of_step(scales, first, step, gl.SliceLayout(0, layout), FORM, TILING)
            product = warpgroup_mma_wait(0, deps=(product,))
            return acc + product * (scale_T[:, None] * scale_N[None, :])
        else:
            scale_T *= gl.load(scales.of_weight_ptr + first // TILING.rows * FORM.steps + step)
            product = warpgroup_mma_wait(0, deps=(product,))
            return acc + product * scale_T[:, None]
    else:
        product = warpgroup_mma_wait(0, deps=(product,))
        return acc + product


@gluon.jit
def _write(  # type: ignore[no-untyped-def]
    acc, desc, place, scales, token, first, FORM: gl.constexpr, TILING: gl.constexpr, ACTIVATION: gl.constexpr
):
    """Write the results of 64 tokens, computed from their sums acc [64, rows].

    If scales hold for all columns (TILING.by_step is False), the sums are first multiplied by their scales. With
    FORM.gated, the results are activation(gate) * up. place: shared memory for the results. token, first: indices of
    the first token and the first output.
    """
    layout: gl.constexpr = acc.type.layout
    if not TILING.by_step:
        token_T = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
        scale_T = gl.load(scales.of_inputs_ptr + token_T, mask=token_T < scales.num_tokens, other=0.0)
        scale_N = _scales_of_rows(scales, first, gl.SliceLayout(0, layout), FORM, TILING)
        acc = acc * (scale_T[:, None] * scale_N[None, :])
    if FORM.gated:
        gate, up = gl.split(acc.reshape([TOKENS, FORM.rows // (2 * BLOCK), 2, BLOCK]).permute((0, 1, 3, 2)))
        acc = gated(gate, up, place.dtype, ACTIVATION).reshape([TOKENS, FORM.rows // 2])
    tma.store_wait(0)
    place.store(acc.to(place.dtype))
    fence_async_shared()
    store_box(desc, [token, first], place)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    y_desc,
    places,
    stages,
    tiles,
    scales,
    FORM: gl.constexpr,
    TILING: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Run a computing group of warps: for each tile, multiply the group's tokens by the tile's rows; write the results.

    places: shared memory for the results of each group. GROUP: index of this group.
    """
    rows: gl.constexpr = FORM.rows
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])
    place = places.index(GROUP)
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), tiles.of_tokens * tiles.of_rows, gl.num_programs(0)):
        token_tile, row_tile = tile_at(number, tiles, FORM)
        token = (token_tile * GROUPS + GROUP) * FORM.tokens
        first = row_tile * outputs
        acc0 = gl.zeros([TOKENS, rows], gl.float32, layout)
        acc1 = gl.zeros([TOKENS, rows], gl.float32, layout)
        for step in range(FORM.steps):
            mbarrier.wait(stages.full.index(stage), phase)
            w = stages.weight.index(stage).permute((1, 0))
            x = stages.tokens.index(stage * GROUPS + GROUP)
            acc0 = _product(acc0, x.slice(0, TOKENS), w, scales, token, first, step, FORM, TILING)
            if FORM.tokens > TOKENS:
                second = x.slice(TOKENS, TOKENS)
                acc1 = _product(acc1, second, w, scales, token + TOKENS, first, step, FORM, TILING)
            mbarrier.arrive(stages.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, FORM.stages)
        _write(acc0, y_desc, place, scales, token, first, FORM, TILING, ACTIVATION)
        if FORM.tokens > TOKENS:
            _write(acc1, y_desc, place, scales, token + TOKENS, first, FORM, TILING, ACTIVATION)
    tma.store_wait(0)


@quick_launches
@gluon.jit(do_not_specialize=["token_tiles", "num_tokens"])
def hopper_codes_kernel(  # type: ignore[no-untyped-def]
    w_desc,
    x_desc,
    y_desc,
    scales_ptr,
    input_scales_ptr,
    input_stride,
    num_tokens,
    num_outputs,
    token_tiles,
    row_tiles,
    K: gl.constexpr,
    GROUP_TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    TILE_COLUMNS: gl.constexpr,
):
    """Compute a linear of codes, y = x @ weight^T, or with GATED activation(gate) * up of the halves of y.

    Program p computes the tiles p, p + num_programs, ... of the result. A tile is ROWS rows of the weight, rows of gate
    and up counted together, and GROUP_TOKENS (64 or 128) tokens for each of the two groups of warps. A step along K
    takes STEP (128) columns.

    w_desc: TMA descriptor of the weight's codes [N, K], with boxes [ROWS, STEP]. If GATED, of a view [N / 2 / BLOCK, 2,
        BLOCK, K], in which BLOCK (8) rows of gate and of up alternate, with boxes [ROWS / 2 / BLOCK, 2, BLOCK, STEP].
    x_desc: TMA descriptor of the codes of x [T, K], with boxes [GROUP_TOKENS, STEP].
    y_desc: TMA descriptor of the results [T, num_outputs], with boxes [64, outputs of a tile].
    scales_ptr: fp32 [N / TILE_ROWS, K / 128] if TILE_COLUMNS is 128; [N / TILE_ROWS] if it is 0, for scales of whole
        rows.
    input_scales_ptr: fp32 [K / 128, T] with rows input_stride elements apart; [T] if TILE_COLUMNS is 0.
    num_tokens: T. num_outputs: N, or N / 2 if GATED. token_tiles, row_tiles: number of tiles of tokens and of rows.
    STAGES: number of stages of the ring buffer. REGISTERS: per computing thread. TOGETHER: number of tiles of tokens
        that are multiplied by the same rows one after another.

    If TILE_COLUMNS is 128, TILE_ROWS must be a multiple of a tile's rows, or with GATED of half of them.
    """
    gdc_launch_dependents()
    element: gl.constexpr = w_desc.dtype
    FORM: gl.constexpr = form_of(K, GROUP_TOKENS, ROWS, STAGES, GATED, TOGETHER)
    TILING: gl.constexpr = tiling_of(TILE_ROWS, TILE_COLUMNS)
    shared: gl.constexpr = shared_layout(8, 2)
    outputs: gl.constexpr = ROWS // 2 if GATED else ROWS
    weight = gl.allocate_shared_memory(element, [STAGES, ROWS, STEP], shared)
    tokens = gl.allocate_shared_memory(element, [STAGES * GROUPS, GROUP_TOKENS, STEP], shared)
    out_shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, outputs * 2), element_bitwidth=16, rank=2
    )
    places = gl.allocate_shared_memory(y_desc.dtype, [GROUPS, TOKENS, outputs], out_shared)
    full, empty = barriers(STAGES, GROUPS)
    fence_async_shared()
    stages = Stages(weight, tokens, full, empty)
    tiles = Tiles(token_tiles, row_tiles)
    scales = Scales(scales_ptr, input_scales_ptr, input_stride, num_tokens, num_outputs)
    gl.warp_specialize(
        [
            (_compute, (y_desc, places, stages, tiles, scales, FORM, TILING, ACTIVATION, 0)),
            (_compute, (y_desc, places, stages, tiles, scales, FORM, TILING, ACTIVATION, 1)),
            (copy, (w_desc, x_desc, stages, tiles, FORM)),
        ],
        [4, 1],
        [REGISTERS, COPYING_REGISTERS],
    )
    gdc_wait()
