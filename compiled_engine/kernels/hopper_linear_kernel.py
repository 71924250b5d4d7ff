"""Gluon kernel of a linear for up to 128 tokens on Hopper: one warp copies, groups of four warps compute.

64 rows of the weight are the left operand of a tensor-core product, and the tokens the right one. The copying warp
fills a ring buffer of stages in shared memory. It copies the weight's first stages before it waits for earlier kernels
(programmatic dependent launch). With GATED, eight rows of gate alternate with the corresponding eight rows of up, so
that one thread holds both.

If a linear has too few rows to use every multiprocessor, a product takes only 64 / PARTS rows of the weight. Their
columns K are divided into PARTS parts, which are stacked to 64 rows; the corresponding parts of the tokens are side by
side. In the product, the blocks on the diagonal belong to equal parts and are summed; other blocks are discarded.

Elements have 16 bits, or are codes with scales. The tensor cores accumulate products of 8-bit codes with fewer bits
than fp32. They therefore multiply 128 columns at a time, and ordinary instructions scale each product and add it to the
sums. Four-bit codes are decoded in registers, see hopper_integers.py. With these, several programs may divide the
columns of the same rows among themselves, and write partial sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.hopper_gate import BLOCK, gated, rows_of_pairs
from compiled_engine.kernels.hopper_integers import WORDS, base_of, decoded, row_layout, word_layout
from compiled_engine.kernels.hopper_ring import (
    STEP_BYTES,
    barriers,
    filled_stage,
    load_box,
    reinterpreted,
    shared_layout,
    stage_to_fill,
    step_of,
)
from compiled_engine.kernels.launch_arguments import LINEAR_COPYING
from compiled_engine.kernels.launcher import quick_launches

# Rows of a product's left operand, and the blocks of gate and of up in them.
ROWS = gl.constexpr(64)
BLOCKS = gl.constexpr(64 // (2 * 8))


class Ring(NamedTuple):
    """Ring buffer in shared memory. A stage holds the weights and tokens of one step along K, and has two barriers."""

    weights: Any  # [stages * groups, products * ROWS, columns], or words of four-bit codes
    tokens: Any  # [stages, products * parts * tokens, columns], or for four-bit codes both halves of the columns
    scales: Any  # of four-bit codes: [stages * groups, products * ROWS]
    zeros: Any  # the same for their zero points, or None
    full: Any  # barriers: the stage is filled
    empty: Any  # barriers: all groups of warps have finished with the stage


class Boxes(NamedTuple):
    """TMA descriptors of the kernel's operands, see hopper_linear_kernel."""

    weights: Any
    tokens: Any
    scales: Any
    zeros: Any


class Form(NamedTuple):
    """Compile-time sizes and options of the kernel."""

    bits: Any  # of an element of the weight
    steps: Any  # steps along K
    groups: Any  # groups of warps that compute
    tokens: Any
    stages: Any
    gated: Any  # the weight holds gate and up
    parts: Any  # parts of K in a product
    products: Any  # products per step
    splits: Any  # programs that share the steps along K of the same rows


@gluon.constexpr_function
def form_of(bits: int, k: int, *numbers: Any) -> Form:
    *_, parts, products, splits = numbers
    columns = parts * products * (64 if bits == 16 else 128)  # see step_of
    return Form(bits, (k + columns - 1) // columns // splits, *numbers)


@gluon.jit
def _load_words(descs, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of four-bit codes, their scales and zero points into a stage.

    Each group of warps gets its own rows. See _load_weight for the arguments.
    """
    groups: gl.constexpr = FORM.groups
    parts: gl.constexpr = FORM.parts
    boxes: gl.constexpr = parts * FORM.products
    rows: gl.constexpr = ROWS // parts
    blocks: gl.constexpr = BLOCKS // parts
    full = ring.full.index(stage)
    # A row's scale has four bytes, its zero point two.
    row_bytes: gl.constexpr = WORDS * 4 + (6 if descs.zeros is not None else 4)
    token_bytes: gl.constexpr = parts * FORM.tokens * 2 * STEP_BYTES
    mbarrier.expect(full, (groups * ROWS * row_bytes + token_bytes) * FORM.products)
    block = (gl.program_id(1) * FORM.steps + step) * boxes
    for i in gl.static_range(groups):
        group = gl.program_id(0) * groups + i
        at = stage * groups + i
        if FORM.gated:
            place = reinterpreted(ring.weights.index(at), [boxes, blocks, 2, BLOCK, WORDS], word_layout(5))
            load_box(descs.weights, [0, group * blocks, 0, 0, block * WORDS], full, place)
            place = reinterpreted(ring.scales.index(at), [boxes, blocks, 2, BLOCK], row_layout(32, 4))
            load_box(descs.scales, [block, group * blocks, 0, 0], full, place)
            if descs.zeros is not None:
                place = reinterpreted(ring.zeros.index(at), [boxes, blocks, 2, BLOCK], row_layout(16, 4))
                load_box(descs.zeros, [block, group * blocks, 0, 0], full, place)
        else:
            place = reinterpreted(ring.weights.index(at), [boxes, rows, WORDS], word_layout(3))
            load_box(descs.weights, [0, group * rows, block * WORDS], full, place)
            place = reinterpreted(ring.scales.index(at), [boxes, rows], row_layout(32, 2))
            load_box(descs.scales, [block, group * rows], full, place)
            if descs.zeros is not None:
                place = reinterpreted(ring.zeros.index(at), [boxes, rows], row_layout(16, 2))
                load_box(descs.zeros, [block, group * rows], full, place)


@gluon.jit
def _load_weight(descs, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of the weight's rows into a stage: for each group of warps, the group's own rows.

    step, stage: indices of the step along K and of the stage. With FORM.gated, blocks of gate and up alternate. The
    stage's barrier is told to expect the bytes of the step's tokens too, which _load_tokens copies.
    """
    if FORM.bits == 4:
        _load_words(descs, step, stage, ring, FORM)
    else:
        _load_rows(descs, step, stage, ring, FORM)


@gluon.jit
def _load_rows(descs, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of the weight into a stage, for elements of 8 or 16 bits. See _load_weight."""
    groups: gl.constexpr = FORM.groups
    parts: gl.constexpr = FORM.parts
    boxes: gl.constexpr = parts * FORM.products
    rows: gl.constexpr = ROWS // parts
    blocks: gl.constexpr = BLOCKS // parts
    columns: gl.constexpr = step_of(FORM.bits)
    blocks_shared: gl.constexpr = shared_layout(FORM.bits, 5)
    parts_shared: gl.constexpr = shared_layout(FORM.bits, 3)
    full = ring.full.index(stage)
    mbarrier.expect(full, (groups * ROWS + parts * FORM.tokens) * FORM.products * STEP_BYTES)
    column = step * (boxes * columns)
    for i in gl.static_range(groups):
        group = gl.program_id(0) * groups + i
        place = ring.weights.index(stage * groups + i)
        if FORM.gated:
            place = reinterpreted(place, [boxes, blocks, 2, BLOCK, columns], blocks_shared)
            load_box(descs.weights, [0, group * blocks, 0, 0, column], full, place)
        else:
            place = reinterpreted(place, [boxes, rows, columns], parts_shared)
            load_box(descs.weights, [0, group * rows, column], full, place)


@gluon.jit
def _load_tokens(descs, step, stage, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy one step of all tokens into a stage. step, stage: indices of the step along K and of the stage."""
    parts: gl.constexpr = FORM.parts
    products: gl.constexpr = FORM.products
    boxes: gl.constexpr = parts * products
    tokens: gl.constexpr = FORM.tokens
    columns: gl.constexpr = step_of(FORM.bits)
    full = ring.full.index(stage)
    if FORM.bits == 4:
        column = (gl.program_id(1) * FORM.steps + step) * (boxes * columns)
        place = reinterpreted(ring.tokens.index(stage), [2, boxes, tokens, 64], shared_layout(16, 4))
        load_box(descs.tokens, [0, 0, 0, column], full, place)
    else:
        place = reinterpreted(ring.tokens.index(stage), [boxes, tokens, columns], shared_layout(FORM.bits, 3))
        load_box(descs.tokens, [0, 0, step * (boxes * columns)], full, place)


@gluon.jit
def copy(descs, ring, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run the copying warp: copy all steps of the weight and the tokens into the ring buffer, in order.

    The weight's first stages are copied before the wait for earlier kernels. The tokens, which an earlier kernel may
    have written, are copied after it.
    """
    stages: gl.constexpr = FORM.stages
    ahead: gl.constexpr = min(stages, FORM.steps)
    for i in range(ahead):
        _load_weight(descs, i, i, ring, FORM)
    gdc_wait()
    for i in range(ahead):
        _load_tokens(descs, i, i, ring, FORM)
    for i in range(ahead, FORM.steps):
        stage = stage_to_fill(ring.empty, i, stages)
        _load_weight(descs, i, stage, ring, FORM)
        _load_tokens(descs, i, stage, ring, FORM)


@gluon.jit
def sum_of_parts(acc, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum over the parts of K, [ROWS / FORM.parts, tokens], taken from the products acc.

    acc: [ROWS, FORM.parts * tokens]. Its rows are the parts of the weight's rows, stacked; its columns are the parts of
    the tokens, side by side. Only the blocks on the diagonal multiply equal parts of K; the others are discarded.
    """
    parts: gl.constexpr = FORM.parts
    part_of_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout)) // (ROWS // parts)
    part_of_token = gl.arange(0, parts * FORM.tokens, layout=gl.SliceLayout(0, acc.type.layout)) // FORM.tokens
    acc = gl.where(part_of_row[:, None] == part_of_token[None, :], acc, 0.0)
    return gl.sum(gl.sum(acc.reshape([parts, ROWS // parts, parts, FORM.tokens]), 2), 0)


# Registers per copying thread.
COPYING_REGISTERS = gl.constexpr(LINEAR_COPYING)


class Arguments(NamedTuple):
    """Arguments of hopper_linear_kernel that the computing groups of warps need."""

    out_ptr: Any
    bias_ptr: Any
    residual_ptr: Any
    num_tokens: Any
    num_outputs: Any
    scales_ptr: Any
    input_scales_ptr: Any
    input_stride: Any


class Scaling(NamedTuple):
    """Sizes of the quantisation tiles, whose codes share a scale. 0 columns: all columns.

    A tile of the weight has `rows` rows and `columns` columns. A tile of the inputs has one row and `input_columns`
    columns.
    """

    rows: Any
    columns: Any
    input_columns: Any


@gluon.constexpr_function
def scaling_of(rows: int, columns: int, input_columns: int) -> Scaling:
    return Scaling(rows, columns, input_columns)


@gluon.jit
def weight_rows(given, layout: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (index in the weight, whether the weight has the row) for each of the ROWS rows of a product.

    The product is a tensor-core product of group GROUP of warps.
    """
    rows: gl.constexpr = ROWS // FORM.parts
    row_N = gl.arange(0, ROWS, layout=layout) % rows
    group = gl.program_id(0) * FORM.groups + GROUP
    if FORM.gated:
        output_N, row_N = rows_of_pairs(row_N, group * (rows // 2), given.num_outputs)
        return row_N, output_N < given.num_outputs
    else:
        return group * rows + row_N, group * rows + row_N < given.num_outputs


@gluon.jit
def _scales_at(  # type: ignore[no-untyped-def]
    given, row_N, there_N, token_T, block_N, block_T, K: gl.constexpr, SCALING: gl.constexpr
):
    """Return (a scale for each row of a product, a scale for each of its tokens).

    row_N, there_N: see weight_rows. token_T: index of each token. block_N, block_T: for each row and token, the index
    of the block of 128 columns that the product multiplies; ignored for scales that hold for all columns.
    """
    blocks: gl.constexpr = (K + 127) // 128
    if SCALING.columns == 0:
        scale_N = gl.load(given.scales_ptr + row_N // SCALING.rows, mask=there_N, other=0.0)
    else:
        offset_N = row_N // SCALING.rows * blocks + block_N
        scale_N = gl.load(given.scales_ptr + offset_N, mask=there_N, other=0.0)
    if SCALING.input_columns == 0:
        scale_T = gl.load(given.input_scales_ptr + token_T)
    else:
        scale_T = gl.load(given.input_scales_ptr + block_T * given.input_stride + token_T)
    return scale_N, scale_T


@gluon.jit
def _scaled_products(given, ring, K: gl.constexpr, FORM: gl.constexpr, SCALING: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply 8-bit codes, apply their scales, and return the sums over all steps, [ROWS, parts * tokens].

    See sum_of_parts for the parts.
    """
    stages: gl.constexpr = FORM.stages
    products: gl.constexpr = FORM.products
    parts: gl.constexpr = FORM.parts
    width: gl.constexpr = parts * FORM.tokens
    by_step: gl.constexpr = SCALING.columns + SCALING.input_columns > 0
    columns: gl.constexpr = step_of(FORM.bits)
    shared: gl.constexpr = shared_layout(FORM.bits, 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_tokens: gl.constexpr = gl.SliceLayout(0, layout)
    row_N, there_N = weight_rows(given, of_rows, FORM, GROUP)
    part_N = gl.arange(0, ROWS, layout=of_rows) // (ROWS // parts)
    column_T = gl.arange(0, width, layout=of_tokens)
    token_T, part_T = column_T % FORM.tokens, column_T // FORM.tokens
    # The tokens have arrived, so earlier kernels have written their scales.
    mbarrier.wait(ring.full.index(0), 0)
    if not by_step:
        scale_N, scale_T = _scales_at(given, row_N, there_N, token_T, part_N, part_T, K, SCALING)
    acc = gl.zeros([ROWS, width], gl.float32, layout)
    nothing = gl.zeros([ROWS, width], gl.float32, layout)
    for i in range(FORM.steps):
        stage = filled_stage(ring.full, i, stages)
        w = reinterpreted(ring.weights.index(stage * FORM.groups + GROUP), [products, ROWS, columns], shared)
        x = reinterpreted(ring.tokens.index(stage), [products, width, columns], shared)
        for j in gl.static_range(products):
            product = warpgroup_mma(w.index(j), x.index(j).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if by_step:
                block = (i * products + j) * parts
                scale_N, scale_T = _scales_at(
                    given, row_N, there_N, token_T, block + part_N, block + part_T, K, SCALING
                )
            product = warpgroup_mma_wait(0, deps=(product,))
            if by_step:
                product *= scale_N[:, None] * scale_T[None, :]
            acc += product
        mbarrier.arrive(ring.empty.index(stage), count=1)
    if not by_step:
        acc *= scale_N[:, None] * scale_T[None, :]
    return acc


@gluon.jit
def _values_of(  # type: ignore[no-untyped-def]
    ring, stage, j: gl.constexpr, dtype: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr
):
    """Decode a group's four-bit codes for product j of a stage: 128 columns of 64 rows.

    Returns (first 64 columns, last 64 columns), [64, 64] each. ZERO: the zero point of all codes, if the weight has no
    zero points of its own. GROUP: index of the group of warps.
    """
    products: gl.constexpr = FORM.products
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.parts * FORM.tokens, 16])
    of_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = stage * FORM.groups + GROUP
    w = reinterpreted(ring.weights.index(at), [products, ROWS, WORDS], word_layout(2))
    if ring.zeros is not None:
        zeros = reinterpreted(ring.zeros.index(at), [products, ROWS], by_row)
        zero_N = zeros.index(j).load(gl.SliceLayout(1, of_left)).to(gl.int32) * 0x10001 + base_of(dtype)
    else:
        zero_N = gl.full([ROWS], ZERO * 0x10001 + base_of(dtype), gl.int32, gl.SliceLayout(1, of_left))
    return decoded(w.index(j).load(of_left), zero_N[:, None], dtype, of_left)


@gluon.jit
def _products_of_integers(  # type: ignore[no-untyped-def]
    ring, dtype: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr
):
    """Multiply four-bit codes, apply their scales, and return the sums over all steps, [ROWS, parts * tokens].

    See sum_of_parts for the parts.
    """
    stages: gl.constexpr = FORM.stages
    products: gl.constexpr = FORM.products
    width: gl.constexpr = FORM.parts * FORM.tokens
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc = gl.zeros([ROWS, width], gl.float32, layout)
    nothing = gl.zeros([ROWS, width], gl.float32, layout)
    mbarrier.wait(ring.full.index(0), 0)
    low, high = _values_of(ring, 0, 0, dtype, ZERO, FORM, GROUP)
    for i in range(FORM.steps):
        stage = i % stages
        x = reinterpreted(ring.tokens.index(stage), [2 * products, width, 64], shared_layout(16, 2))
        scales = reinterpreted(ring.scales.index(stage * FORM.groups + GROUP), [products, ROWS], by_row)
        for j in gl.static_range(products):
            product = warpgroup_mma(low, x.index(j).permute((1, 0)), nothing, use_acc=False, is_async=True)
            product = warpgroup_mma(high, x.index(products + j).permute((1, 0)), product, is_async=True)
            scale_N = scales.index(j).load(of_rows)
            # The next values are decoded during the products.
            if j + 1 < products:
                low, high = _values_of(ring, stage, j + 1, dtype, ZERO, FORM, GROUP)
            else:
                following = (i + 1) % stages
                if i + 1 < FORM.steps:
                    mbarrier.wait(ring.full.index(following), ((i + 1) // stages) & 1)
                low, high = _values_of(ring, following, 0, dtype, ZERO, FORM, GROUP)
            product = warpgroup_mma_wait(0, deps=(product,))
            acc += product * scale_N[:, None]
        mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc


@gluon.jit
def _products(ring, FORM: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply 16-bit elements, and return the sums over all steps, [ROWS, parts * tokens].

    See sum_of_parts for the parts. A stage is marked as empty once the products of the next step have been started.
    """
    stages: gl.constexpr = FORM.stages
    products: gl.constexpr = FORM.products
    width: gl.constexpr = FORM.parts * FORM.tokens
    columns: gl.constexpr = step_of(FORM.bits)
    shared: gl.constexpr = shared_layout(FORM.bits, 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    acc = gl.zeros([ROWS, width], gl.float32, layout)
    for i in range(FORM.steps):
        stage = filled_stage(ring.full, i, stages)
        w = reinterpreted(ring.weights.index(stage * FORM.groups + GROUP), [products, ROWS, columns], shared)
        x = reinterpreted(ring.tokens.index(stage), [products, width, columns], shared)
        for j in gl.static_range(products):
            acc = warpgroup_mma(w.index(j), x.index(j).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(products, deps=(acc,))
        if i > 0:
            mbarrier.arrive(ring.empty.index((i - 1) % stages), count=1)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _store_partial(given, y_NT, FORM: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sums over this program's part of the columns to given.out_ptr, [splits, num_tokens, N].

    y_NT: the sums, [rows of a group of warps, tokens]. N: number of rows of the weight.
    """
    rows: gl.constexpr = ROWS // FORM.parts
    num_rows = given.num_outputs * 2 if FORM.gated else given.num_outputs
    row_N = gl.arange(0, rows, layout=gl.SliceLayout(1, y_NT.type.layout))
    token_T = gl.arange(0, FORM.tokens, layout=gl.SliceLayout(0, y_NT.type.layout))
    group = gl.program_id(0) * FORM.groups + GROUP
    if FORM.gated:
        output_N, at_N = rows_of_pairs(row_N, group * (rows // 2), given.num_outputs)
    else:
        output_N = group * rows + row_N
        at_N = output_N
    first = gl.program_id(1) * given.num_tokens
    offsets_NT = (first + token_T)[None, :] * num_rows + at_N[:, None]
    there_NT = (output_N < given.num_outputs)[:, None] & (token_T < given.num_tokens)[None, :]
    gl.store(given.out_ptr + offsets_NT, y_NT, mask=there_NT)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    given,
    out_smem,
    ring,
    K: gl.constexpr,
    FORM: gl.constexpr,
    SCALING: gl.constexpr,
    ZERO: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Run a computing group of warps: multiply its rows of the weight by the tokens, and write the results.

    out_smem: shared memory [TOKENS, outputs], to transpose the results. GROUP: index of this group.
    """
    tokens: gl.constexpr = FORM.tokens
    rows: gl.constexpr = ROWS // FORM.parts
    outputs: gl.constexpr = rows // 2 if FORM.gated else rows
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // outputs, outputs // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out_smem.dtype
    first = (gl.program_id(0) * FORM.groups + GROUP) * outputs
    token_T = gl.arange(0, tokens, layout=gl.SliceLayout(1, io_layout))
    output_M = first + gl.arange(0, outputs, layout=gl.SliceLayout(0, io_layout))
    offsets_TM = token_T[:, None] * given.num_outputs + output_M[None, :]
    there_TM = (token_T < given.num_tokens)[:, None] & (output_M < given.num_outputs)[None, :]
    if given.residual_ptr is not None:
        # The tokens have arrived, so earlier kernels have written the residual.
        mbarrier.wait(ring.full.index(0), 0)
        residual_TM = gl.load(given.residual_ptr + offsets_TM, mask=there_TM, other=0.0)
    if FORM.bits == 4:
        y_NT = _products_of_integers(ring, dtype, ZERO, FORM, GROUP)
    elif FORM.bits == 8:
        y_NT = _scaled_products(given, ring, K, FORM, SCALING, GROUP)
    else:
        y_NT = _products(ring, FORM, GROUP)
    if FORM.parts > 1:
        y_NT = sum_of_parts(y_NT, FORM)
    if FORM.splits > 1:
        _store_partial(given, y_NT, FORM, GROUP)
        return
    if given.bias_ptr is not None:
        row_N = gl.arange(0, rows, layout=gl.SliceLayout(1, y_NT.type.layout))
        output_N = first + row_N
        bias_at_N = output_N
        if FORM.gated:
            output_N, bias_at_N = rows_of_pairs(row_N, first, given.num_outputs)
        bias_N = gl.load(given.bias_ptr + bias_at_N, mask=output_N < given.num_outputs, other=0.0)
        y_NT += bias_N.to(gl.float32)[:, None]
    if FORM.gated:
        pairs = y_NT.reshape([BLOCKS // FORM.parts, 2, BLOCK, tokens]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        y_NT = gated(gate, up, dtype, ACTIVATION).reshape([outputs, tokens])
    out_smem.permute((1, 0)).store(y_NT.to(dtype))
    y_TM = out_smem.load(io_layout)
    if given.residual_ptr is not None:
        y_TM = (y_TM.to(gl.float32) + residual_TM.to(gl.float32)).to(dtype)
    gl.store(given.out_ptr + offsets_TM, y_TM, mask=there_TM)


@quick_launches
@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_linear_kernel(  # type: ignore[no-untyped-def]
    w_desc,
    x_desc,
    out_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_outputs,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PRODUCTS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
    scales_ptr=None,
    input_scales_ptr=None,
    input_stride=0,
    TILE_ROWS: gl.constexpr = 1,
    TILE_COLUMNS: gl.constexpr = 0,
    INPUT_COLUMNS: gl.constexpr = 0,
    s_desc=None,
    z_desc=None,
    ZERO: gl.constexpr = 0,
    SPLITS: gl.constexpr = 1,
):
    """Compute y = x @ weight^T + bias, or with GATED activation(gate) * up of the halves of y; add the residual.

    There are at most TOKENS tokens. Program (i, split) computes GROUPS * ROWS / PARTS rows of the weight, from i times
    that number on. GROUPS: 1 to 3 groups of warps, each of which multiplies ROWS (64) rows at a time. PARTS: parts of K
    that are stacked in these rows, see sum_of_parts. PRODUCTS: tensor-core products in a step along K. A step takes
    PARTS * PRODUCTS * STEP columns, where STEP is 64, or 128 for codes.

    w_desc: TMA descriptor of PARTS * PRODUCTS overlapping views of the weight, each STEP columns after the previous
        one: [PARTS * PRODUCTS, N, K], with boxes [PARTS * PRODUCTS, ROWS / PARTS, STEP]. If GATED, BLOCK (8) rows of
        gate and of up alternate in the views: [PARTS * PRODUCTS, N / 2 / BLOCK, 2, BLOCK, K], with boxes [PARTS *
        PRODUCTS, BLOCKS / PARTS, 2, BLOCK, STEP], where BLOCKS is ROWS / 2 / BLOCK.
    x_desc: the same views of x: [PARTS * PRODUCTS, T, K], with boxes [PARTS * PRODUCTS, TOKENS, STEP].
    out_ptr, residual_ptr: [num_tokens, num_outputs], contiguous; residual_ptr may be None. bias_ptr: [N] or None.
    num_tokens: T. num_outputs: N, or N / 2 if GATED. STAGES: number of stages of the ring buffer. REGISTERS: per
        computing thread.
    scales_ptr: for 8-bit codes, fp32 [R, C], a scale of the weight for each TILE_ROWS rows by TILE_COLUMNS columns
        (128; 0: all columns).
    input_scales_ptr: for 8-bit codes, fp32 [C, input_stride], a scale of each token for each INPUT_COLUMNS columns
        (128; 0: all columns). TOKENS scales must be readable in each row.

    For four-bit codes, K must be a multiple of 128 and N of 16, and these arguments differ:
    w_desc: with WORDS (16) words in place of STEP columns, see hopper_integers.py.
    x_desc: the first and the last 64 columns of each STEP: [2, PARTS * PRODUCTS, T, K], with boxes [2, PARTS *
        PRODUCTS, TOKENS, 64].
    s_desc, z_desc: TMA descriptors of scales (fp32) and zero points (int16), [K / 128, N], with boxes of the same rows
        as w_desc. z_desc None: the zero point of all codes is ZERO.
    SPLITS: number of programs among which K is divided. If it is more than 1, out_ptr is fp32 [SPLITS, num_tokens, N]
        and receives the partial sums, without activation; bias_ptr and residual_ptr must be None.
    """
    gdc_launch_dependents()
    element: gl.constexpr = w_desc.dtype
    # Four-bit codes are stored in words.
    bits: gl.constexpr = 4 if element.primitive_bitwidth == 32 else element.primitive_bitwidth
    FORM: gl.constexpr = form_of(bits, K, GROUPS, TOKENS, STAGES, GATED, PARTS, PRODUCTS, SPLITS)
    SCALING: gl.constexpr = scaling_of(TILE_ROWS, TILE_COLUMNS, INPUT_COLUMNS)
    columns: gl.constexpr = step_of(FORM.bits)
    dtype: gl.constexpr = x_desc.dtype if FORM.bits == 4 else out_ptr.dtype.element_ty
    outputs: gl.constexpr = ROWS // PARTS // 2 if GATED else ROWS // PARTS
    out_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=outputs * 2, element_bitwidth=16, rank=2)
    out_smem = gl.allocate_shared_memory(dtype, [GROUPS, TOKENS, outputs], out_shared)
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if FORM.bits == 4:
        token: gl.constexpr = x_desc.dtype
        weights = gl.allocate_shared_memory(element, [STAGES * GROUPS, PRODUCTS * ROWS, WORDS], word_layout(2))
        tokens = gl.allocate_shared_memory(token, [STAGES, 2 * PRODUCTS * PARTS * TOKENS, 64], shared_layout(16, 2))
        scales = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, PRODUCTS * ROWS], by_row)
    else:
        shared: gl.constexpr = shared_layout(FORM.bits, 2)
        weights = gl.allocate_shared_memory(element, [STAGES * GROUPS, PRODUCTS * ROWS, columns], shared)
        tokens = gl.allocate_shared_memory(element, [STAGES, PRODUCTS * PARTS * TOKENS, columns], shared)
        scales = None
    if z_desc is not None:
        zeros = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, PRODUCTS * ROWS], by_row)
    else:
        zeros = None
    descs = Boxes(w_desc, x_desc, s_desc, z_desc)
    full, empty = barriers(STAGES, GROUPS)
    fence_async_shared()
    ring = Ring(weights, tokens, scales, zeros, full, empty)
    given = Arguments(
        out_ptr, bias_ptr, residual_ptr, num_tokens, num_outputs, scales_ptr, input_scales_ptr, input_stride
    )
    # The arguments are written inline: a tuple in a variable would turn compile-time constants into runtime values.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (given, out_smem.index(0), ring, K, FORM, SCALING, ZERO, ACTIVATION, 0)),
                (copy, (descs, ring, FORM)),
            ],
            [1],
            [COPYING_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (given, out_smem.index(0), ring, K, FORM, SCALING, ZERO, ACTIVATION, 0)),
                (_compute, (given, out_smem.index(1), ring, K, FORM, SCALING, ZERO, ACTIVATION, 1)),
                (copy, (descs, ring, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (given, out_smem.index(0), ring, K, FORM, SCALING, ZERO, ACTIVATION, 0)),
                (_compute, (given, out_smem.index(1), ring, K, FORM, SCALING, ZERO, ACTIVATION, 1)),
                (_compute, (given, out_smem.index(2), ring, K, FORM, SCALING, ZERO, ACTIVATION, 2)),
                (copy, (descs, ring, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    gdc_wait()
