"""Gluon kernel of a linear of four-bit codes for many tokens on Hopper: a copying warp and two computing groups.

As in hopper_product_kernel, a program computes tiles of the result one after another, and rows of the weight are the
left operand of the tensor cores' products. The left operand is decoded in registers, see hopper_integers.py: codes
minus zero points, times their scale, rounded to the results' type. The sums thus equal those of a product with the
decoded weight, up to rounding.

A product takes half of a block of 128 columns. A group decodes the left operand of the next half while a product runs,
and waits for the product after that. A branch lies between decoding and the wait, that of the wait for tokens: within a
block of instructions without branches, the assembler moves those that decode behind the wait for the product, where
they find the tensor cores idle.

A block needs few bytes of codes and many of tokens, so codes and tokens have separate ring buffers: a stage of codes
holds a block, a stage of tokens half of a block's columns. The tokens of a tile are one or two parts, see
hopper_product_kernel; each code is decoded once for all of them.

If a linear has too few tiles to occupy every multiprocessor, the columns of each tile are split among several programs,
which write partial sums, see split_sums.
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

from compiled_engine.kernels.hopper_gate import BLOCK, rows_of_pairs
from compiled_engine.kernels.hopper_integers import (
    WORDS,
    base_of,
    decoded_and_scaled,
    in_two_parts,
    row_layout,
    word_layout,
)
from compiled_engine.kernels.hopper_product_kernel import (
    COPYING_REGISTERS,
    SMALL,
    Descriptors,
    Places,
    Tiles,
    chunk_of,
    form_of,
    tile_at,
    write_all,
)
from compiled_engine.kernels.hopper_ring import (
    barriers,
    load_box,
    next_stage,
    reinterpreted,
    shared_layout,
    stage_to_fill,
)
from compiled_engine.kernels.launcher import quick_launches

# Rows of the weight that a group of warps multiplies; groups; columns of a stage of tokens.
ROWS = gl.constexpr(64)
GROUPS = gl.constexpr(2)
HALF = gl.constexpr(64)


class Codes(NamedTuple):
    """TMA descriptors of the weight's codes, of their scales, and of their zero points or None."""

    words: Any
    scales: Any
    zeros: Any


class Ring(NamedTuple):
    """Two ring buffers in shared memory, of codes and of tokens. A stage has two barriers.

    One barrier is completed when the stage is full, the other when all groups of warps have read it.
    """

    words: Any  # [stages * GROUPS, ROWS, WORDS]
    scales: Any  # [stages * GROUPS, ROWS]
    zeros: Any  # the same, or None
    words_full: Any
    words_empty: Any
    tokens0: Any  # parts of the tokens, each [stages, part, HALF]
    tokens1: Any
    tokens_full: Any
    tokens_empty: Any


class Ending(NamedTuple):
    """Kernel arguments for writing results: pointers, or None, to the bias and to the partial sums, and sizes."""

    bias_ptr: Any
    partials_ptr: Any
    num_tokens: Any
    num_outputs: Any


@gluon.jit
def _load_codes(codes, row_tile, block, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy a block's codes, scales and zero points into a stage: for each group of warps, the group's rows.

    row_tile, block, stage: indices of the tile of rows, of the block of 128 columns and of the stage.
    """
    blocks: gl.constexpr = ROWS // (2 * BLOCK)
    # A row's scale has four bytes, its zero point two.
    row_bytes: gl.constexpr = WORDS * 4 + (6 if codes.zeros is not None else 4)
    full = ring.words_full.index(stage)
    mbarrier.expect(full, GROUPS * ROWS * row_bytes)
    for i in gl.static_range(GROUPS):
        group = row_tile * GROUPS + i
        at = stage * GROUPS + i
        if FORM.gated:
            place = reinterpreted(ring.words.index(at), [blocks, 2, BLOCK, WORDS], word_layout(4))
            load_box(codes.words, [group * blocks, 0, 0, block * WORDS], full, place)
            place = reinterpreted(ring.scales.index(at), [1, blocks, 2, BLOCK], row_layout(32, 4))
            load_box(codes.scales, [block, group * blocks, 0, 0], full, place)
            if codes.zeros is not None:
                place = reinterpreted(ring.zeros.index(at), [1, blocks, 2, BLOCK], row_layout(16, 4))
                load_box(codes.zeros, [block, group * blocks, 0, 0], full, place)
        else:
            load_box(codes.words, [group * ROWS, block * WORDS], full, ring.words.index(at))
            place = reinterpreted(ring.scales.index(at), [1, ROWS], row_layout(32, 2))
            load_box(codes.scales, [block, group * ROWS], full, place)
            if codes.zeros is not None:
                place = reinterpreted(ring.zeros.index(at), [1, ROWS], row_layout(16, 2))
                load_box(codes.zeros, [block, group * ROWS], full, place)


@gluon.jit
def copy(  # type: ignore[no-untyped-def]
    codes, descs, ring, tiles, FORM: gl.constexpr, WORD_STAGES: gl.constexpr, SPLITS: gl.constexpr
):
    """Run the copying warp: copy all blocks of the program's tiles into the ring buffers, in order.

    The first codes are copied before the wait for earlier kernels. The tokens, which an earlier kernel may have
    written, are copied after it.
    """
    stages: gl.constexpr = FORM.stages
    tokens: gl.constexpr = FORM.part0 + FORM.part1
    ahead: gl.constexpr = min(WORD_STAGES, FORM.steps)
    in_split = tiles.of_tokens * tiles.of_rows
    number = gl.program_id(0)
    token_tile, row_tile = tile_at(number % in_split, tiles, FORM)
    for i in range(ahead):
        _load_codes(codes, row_tile, number // in_split * FORM.steps + i, i, ring, FORM)
    gdc_wait()
    count = 0
    while number < in_split * SPLITS:
        token_tile, row_tile = tile_at(number % in_split, tiles, FORM)
        first = number // in_split * FORM.steps
        for step in range(FORM.steps):
            if count >= ahead:
                stage = stage_to_fill(ring.words_empty, count, WORD_STAGES)
                _load_codes(codes, row_tile, first + step, stage, ring, FORM)
            for second in gl.static_range(2):
                half = 2 * count + second
                stage = stage_to_fill(ring.tokens_empty, half, stages)
                full = ring.tokens_full.index(stage)
                mbarrier.expect(full, tokens * HALF * 2)
                column = (first + step) * (2 * HALF) + second * HALF
                load_box(descs.tokens0, [token_tile * tokens, column], full, ring.tokens0.index(stage))
                if FORM.part1 > 0:
                    token = token_tile * tokens + FORM.part0
                    load_box(descs.tokens1, [token, column], full, ring.tokens1.index(stage))
            count += 1
        number += gl.num_programs(0)


@gluon.jit
def _values_of(  # type: ignore[no-untyped-def]
    ring,
    stage,
    dtype: gl.constexpr,
    ZERO: gl.constexpr,
    of_left: gl.constexpr,
    HALF_OF: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Decode one half, HALF_OF, of 128 columns of a group's rows; return their values, [ROWS, HALF].

    stage: index of the stage that holds these columns. ZERO: the zero point of all codes, if the weight has no zero
    points of its own. of_left: layout of the results, that of a left operand. GROUP: index of the group of warps.
    """
    at = stage * GROUPS + GROUP
    if ring.zeros is not None:
        zero_N = ring.zeros.index(at).load(gl.SliceLayout(1, of_left)).to(gl.int32) * 0x10001 + base_of(dtype)
    else:
        zero_N = gl.full([ROWS], ZERO * 0x10001 + base_of(dtype), gl.int32, gl.SliceLayout(1, of_left))
    scale_N, rest_N = in_two_parts(ring.scales.index(at).load(gl.SliceLayout(1, of_left)), dtype)
    words = ring.words.index(at).load(of_left)
    return decoded_and_scaled(words, zero_N[:, None], scale_N[:, None], rest_N[:, None], dtype, HALF_OF, of_left)


@gluon.jit
def _rows_of(ending, row_tile, layout: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (index in the weight, whether the weight has the row) for each of a group's ROWS rows of a tile."""
    row_N = (row_tile * GROUPS + GROUP) * ROWS + gl.arange(0, ROWS, layout=layout)
    output_N = row_N
    if FORM.gated:
        output_N, row_N = rows_of_pairs(row_N, 0, ending.num_outputs)
    return row_N, output_N < ending.num_outputs


@gluon.jit
def _store_partial(acc, ending, split, token, row_N, there_N, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums `acc` of a part of a tile, over part number `split` of the columns, to ending.partials_ptr.

    The partial sums are [splits, num_tokens, N]. token: index of the first token. row_N, there_N: see _rows_of.
    """
    num_rows = ending.num_outputs * 2 if FORM.gated else ending.num_outputs
    token_T = token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    offsets_NT = (split * ending.num_tokens + token_T)[None, :] * num_rows + row_N[:, None]
    gl.store(ending.partials_ptr + offsets_NT, acc, mask=there_N[:, None] & (token_T < ending.num_tokens)[None, :])


@gluon.jit
def _multiply(left, ring, stage, acc0, acc1, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to add left @ tokens^T, of the tokens in a stage, to the sums of each part; return these, (acc0, acc1)."""
    acc0 = warpgroup_mma(left, ring.tokens0.index(stage).permute((1, 0)), acc0, is_async=True)
    if FORM.part1 > 0:
        of_part1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.part1, 16])
        other = gl.convert_layout(left, gl.DotOperandLayout(0, of_part1, 2))
        acc1 = warpgroup_mma(other, ring.tokens1.index(stage).permute((1, 0)), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def _ended(acc0, acc1, RUNNING: gl.constexpr, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until at most the newest RUNNING products still run; return the sums (acc0, acc1)."""
    if FORM.part1 > 0:
        acc0, acc1 = warpgroup_mma_wait(2 * RUNNING, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(RUNNING, deps=(acc0,))
    return acc0, acc1


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    descs,
    places,
    ring,
    tiles,
    ending,
    FORM: gl.constexpr,
    WORD_STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    ZERO: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Run a group of warps: for each tile, multiply the group's rows of the weight by the tokens; write the results.

    places: shared memory for results. GROUP: index of this group.
    """
    part0: gl.constexpr = FORM.part0
    part1: gl.constexpr = FORM.part1
    outputs: gl.constexpr = ROWS // 2 if FORM.gated else ROWS
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part0, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(part1, 8), 16])
    of_left: gl.constexpr = gl.DotOperandLayout(0, layout0, 2)
    dtype: gl.constexpr = descs.tokens0.dtype
    in_split = tiles.of_tokens * tiles.of_rows
    # Stages, and phases of their barriers, of the block and of the half whose product starts next.
    block = 0
    block_phase = 0
    half = 0
    half_phase = 0
    for number in range(gl.program_id(0), in_split * SPLITS, gl.num_programs(0)):
        acc0 = gl.zeros([ROWS, part0], gl.float32, layout0)
        acc1 = gl.zeros([ROWS, max(part1, 8)], gl.float32, layout1)
        mbarrier.wait(ring.words_full.index(block), block_phase)
        left = _values_of(ring, block, dtype, ZERO, of_left, 0, GROUP)
        mbarrier.wait(ring.tokens_full.index(half), half_phase)
        for step in range(FORM.steps):
            acc0, acc1 = _multiply(left, ring, half, acc0, acc1, FORM)
            before = half
            half, half_phase = next_stage(half, half_phase, FORM.stages)
            right = _values_of(ring, block, dtype, ZERO, of_left, 1, GROUP)
            mbarrier.arrive(ring.words_empty.index(block), count=1)
            block, block_phase = next_stage(block, block_phase, WORD_STAGES)
            mbarrier.wait(ring.tokens_full.index(half), half_phase)
            acc0, acc1 = _multiply(right, ring, half, acc0, acc1, FORM)
            acc0, acc1 = _ended(acc0, acc1, 1, FORM)
            mbarrier.arrive(ring.tokens_empty.index(before), count=1)
            before = half
            half, half_phase = next_stage(half, half_phase, FORM.stages)
            # After the last block these values are not used.
            if step + 1 < FORM.steps:
                mbarrier.wait(ring.words_full.index(block), block_phase)
            left = _values_of(ring, block, dtype, ZERO, of_left, 0, GROUP)
            if step + 1 < FORM.steps:
                mbarrier.wait(ring.tokens_full.index(half), half_phase)
            acc0, acc1 = _ended(acc0, acc1, 0, FORM)
            mbarrier.arrive(ring.tokens_empty.index(before), count=1)
        token_tile, row_tile = tile_at(number % in_split, tiles, FORM)
        token = token_tile * (part0 + part1)
        row_N, there_N = _rows_of(ending, row_tile, gl.SliceLayout(1, layout0), FORM, GROUP)
        row1_N, there1_N = _rows_of(ending, row_tile, gl.SliceLayout(1, layout1), FORM, GROUP)
        if SPLITS > 1:
            split = number // in_split
            _store_partial(acc0, ending, split, token, row_N, there_N, FORM)
            if part1 > 0:
                _store_partial(acc1, ending, split, token + part0, row1_N, there1_N, FORM)
        else:
            if ending.bias_ptr is not None:
                acc0 += gl.load(ending.bias_ptr + row_N, mask=there_N, other=0.0).to(gl.float32)[:, None]
                if part1 > 0:
                    acc1 += gl.load(ending.bias_ptr + row1_N, mask=there1_N, other=0.0).to(gl.float32)[:, None]
            output = (row_tile * GROUPS + GROUP) * outputs
            write_all(acc0, acc1, acc1, descs, token, output, places, FORM, ACTIVATION, GROUP)
    if SPLITS == 1:
        tma.store_wait(0)


@quick_launches
@gluon.jit(do_not_specialize=["token_tiles", "num_tokens"])
def hopper_integer_product_kernel(  # type: ignore[no-untyped-def]
    w_desc,
    s_desc,
    z_desc,
    x0_desc,
    x1_desc,
    y0_desc,
    y1_desc,
    bias_ptr,
    partials_ptr,
    num_tokens,
    num_outputs,
    token_tiles,
    row_tiles,
    K: gl.constexpr,
    PART0: gl.constexpr,
    PART1: gl.constexpr,
    STAGES: gl.constexpr,
    WORD_STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOGETHER: gl.constexpr,
    ZERO: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute y = x @ weight^T + bias, or with GATED activation(gate) * up of the halves of y.

    Program p computes the tiles p, p + num_programs, ... of the result. A tile is GROUPS * ROWS (2 * 64) rows of the
    weight and PART0 + PART1 tokens, over one of SPLITS parts of K. All tiles of a part precede those of the next.

    w_desc: TMA descriptor of the codes in int32 words (see hopper_integers.py) [N, K / 8], with boxes [ROWS, WORDS]. If
        GATED, of a view [N / 2 / BLOCK, 2, BLOCK, K / 8], in which BLOCK (8) rows of gate and of up alternate, with
        boxes [ROWS / 2 / BLOCK, 2, BLOCK, WORDS]. WORDS (16) words hold 128 columns.
    s_desc, z_desc: TMA descriptors of scales (fp32) and zero points (int16), [K / 128, N], with boxes of the same rows
        as w_desc. z_desc None: the zero point of all codes is ZERO.
    x0_desc, x1_desc: TMA descriptors of x [T, K], with boxes [part, 64], one per part; x1_desc is None if PART1 is 0.
    y0_desc, y1_desc: TMA descriptors of the results [T, num_outputs], with boxes [part, outputs of a group of warps] of
        at most hopper_product_kernel.chunk_of tokens. None if SPLITS is more than 1, y1_desc also if PART1 is 0.
    bias_ptr: [N] or None. partials_ptr: None, or if SPLITS is more than 1, fp32 [SPLITS, T, N]: receives the partial
        sums, without activation; bias_ptr must then be None.
    token_tiles, row_tiles: number of tiles of tokens and of rows. TOGETHER: number of tiles of tokens that are
        multiplied by the same rows one after another. STAGES, WORD_STAGES: stages of the ring buffers of tokens and of
        codes. REGISTERS: per computing thread.
    """
    gdc_launch_dependents()
    FORM: gl.constexpr = form_of(4, K // SPLITS, GROUPS, ROWS, PART0, PART1, 0, STAGES, GATED, TOGETHER)
    outputs: gl.constexpr = ROWS // 2 if GATED else ROWS
    chunk: gl.constexpr = chunk_of(ROWS, GATED)
    dtype: gl.constexpr = x0_desc.dtype
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [WORD_STAGES * GROUPS, ROWS, WORDS], word_layout(2))
    scales = gl.allocate_shared_memory(gl.float32, [WORD_STAGES * GROUPS, ROWS], by_row)
    zeros = None
    if z_desc is not None:
        zeros = gl.allocate_shared_memory(gl.int16, [WORD_STAGES * GROUPS, ROWS], by_row)
    tokens0 = gl.allocate_shared_memory(dtype, [STAGES, PART0, HALF], shared_layout(16, 2))
    tokens1 = tokens0
    if PART1 > 0:
        tokens1 = gl.allocate_shared_memory(dtype, [STAGES, PART1, HALF], shared_layout(16, 2))
    out0 = tokens0
    out1 = tokens0
    if SPLITS == 1:
        out_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=outputs * 2, element_bitwidth=16, rank=2)
        out0 = gl.allocate_shared_memory(dtype, [GROUPS, min(PART0, chunk), outputs], out_shared)
        out1 = out0
        if chunk < PART0 and GATED:
            out1 = gl.allocate_shared_memory(dtype, [GROUPS, chunk, outputs], out_shared)
        if PART1 > 0 and PART1 <= SMALL:
            out1 = gl.allocate_shared_memory(dtype, [GROUPS, PART1, outputs], out_shared)
    words_full, words_empty = barriers(WORD_STAGES, GROUPS)
    tokens_full, tokens_empty = barriers(STAGES, GROUPS)
    fence_async_shared()
    codes = Codes(w_desc, s_desc, z_desc)
    descs = Descriptors(w_desc, x0_desc, x1_desc, None, y0_desc, y1_desc, None)
    ring = Ring(words, scales, zeros, words_full, words_empty, tokens0, tokens1, tokens_full, tokens_empty)
    tiles = Tiles(token_tiles, row_tiles)
    places = Places(out0, out1, out1)
    ending = Ending(bias_ptr, partials_ptr, num_tokens, num_outputs)
    # The arguments are written inline: a tuple in a variable would turn compile-time constants into runtime values.
    gl.warp_specialize(
        [
            (_compute, (descs, places, ring, tiles, ending, FORM, WORD_STAGES, SPLITS, ZERO, ACTIVATION, 0)),
            (_compute, (descs, places, ring, tiles, ending, FORM, WORD_STAGES, SPLITS, ZERO, ACTIVATION, 1)),
            (copy, (codes, descs, ring, tiles, FORM, WORD_STAGES, SPLITS)),
        ],
        [4, 1],
        [REGISTERS, COPYING_REGISTERS],
    )
    gdc_wait()
