"""The tiles of a product of many tokens on Hopper, their stages in shared memory, and the warp that fills these."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from compiled_engine.kernels.hopper_linear_ring import BLOCK, STEP, boxes_of, load_box

GATED_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))


class Form(NamedTuple):
    """What a kernel is compiled for: steps of K, groups of warps that compute, rows of the weight for each, parts of
    the tokens (0: none), stages, gate and up, token tiles that take the same rows one after another."""

    steps: Any
    groups: Any
    rows: Any
    part0: Any
    part1: Any
    part2: Any
    stages: Any
    gated: Any
    together: Any


class Descriptors(NamedTuple):
    """Of the weight, and by parts of a tile of the tokens and of the results."""

    weight: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    results0: Any
    results1: Any
    results2: Any


class Stages(NamedTuple):
    """Of the weight, [stages * groups, rows, STEP], and of the parts of the tokens, [stages, part, STEP]; for each
    stage the barriers that say that it is full, and that all groups of warps have done with it."""

    weight: Any
    tokens0: Any
    tokens1: Any
    tokens2: Any
    full: Any
    empty: Any


class Tiles(NamedTuple):
    """How many there are."""

    of_tokens: Any
    of_rows: Any


@gluon.constexpr_function
def form_of(k: int, *numbers: Any) -> Form:
    return Form((k + 63) // 64, *numbers)


@gluon.jit
def tile_at(number, tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Its tokens and its rows. Some token tiles go together over all rows, so that the L2 cache keeps them."""
    many = FORM.together * tiles.of_rows
    first = number // many * FORM.together
    size = gl.minimum(tiles.of_tokens - first, FORM.together)
    within = number % many
    return first + within % size, within // size


@gluon.jit
def _load_weight(desc, row_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Each group's rows, in blocks of gate and of up if it is gated; the barrier waits for the tokens too."""
    groups: gl.constexpr = FORM.groups
    rows: gl.constexpr = FORM.rows
    blocks: gl.constexpr = rows // (2 * BLOCK)
    tokens: gl.constexpr = FORM.part0 + FORM.part1 + FORM.part2
    full = stages.full.index(stage)
    mbarrier.expect(full, (groups * rows + tokens) * STEP * 2)
    for i in gl.static_range(groups):
        group = row_tile * groups + i
        place = stages.weight.index(stage * groups + i)
        if FORM.gated:
            place = boxes_of(place, [blocks, 2, BLOCK, STEP], GATED_SHARED)
            load_box(desc, [group * blocks, 0, 0, step * STEP], full, place)
        else:
            load_box(desc, [group * rows, step * STEP], full, place)


@gluon.jit
def _load_tokens(descs, token_tile, step, stage, stages, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    full = stages.full.index(stage)
    first = token_tile * (FORM.part0 + FORM.part1 + FORM.part2)
    load_box(descs.tokens0, [first, step * STEP], full, stages.tokens0.index(stage))
    if FORM.part1 > 0:
        load_box(descs.tokens1, [first + FORM.part0, step * STEP], full, stages.tokens1.index(stage))
    if FORM.part2 > 0:
        load_box(descs.tokens2, [first + FORM.part0 + FORM.part1, step * STEP], full, stages.tokens2.index(stage))


@gluon.jit
def copy(descs, stages, tiles, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """The warp that copies: of the first tile the first stages' rows before the wait for earlier kernels, their tokens
    after it, then all others."""
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
            stage = count % number_of_stages
            mbarrier.wait(stages.empty.index(stage), (count // number_of_stages) & 1 ^ 1)
            _load_weight(descs.weight, row_tile, step, stage, stages, FORM)
            _load_tokens(descs, token_tile, step, stage, stages, FORM)
            count += 1
        first_step = 0
        number += gl.num_programs(0)
