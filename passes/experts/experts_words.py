"""Triton device functions for products of e2m1 codes (MXFP4, NVFP4) on tensor cores, several tokens at a time.

A row's block of 128 columns is 16 words of eight codes. Rows of the weight are the tensor cores' left operand, which is
taken from registers. Four threads share the columns of a row: of each 16 columns of the operand, each thread has two
pairs. A product may take columns in any order, so the operand's columns are in the order of `operand_place`. In this
order, a thread's 32 columns of a block are those of the 16 bytes that it reads, so threads exchange no values. Inputs
are stored in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.passes.experts.experts_packed import POWER, pair_of, pair_of_scales, scale_of

# Columns of a block of the operand.
BLOCK_COLUMNS = 128
# Format of scales -> columns of a unit of codes, and of a tile that shares a scale.
UNIT_COLUMNS = {"e8m0": 32, "e4m3": 16}


@triton.jit
def operand_place(column: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return the place of a column of the weight among the operand's columns.

    The bits of a place within a block are, from the highest on: two for the code in a half of a word, two for the word
    in 16 bytes, two for these bytes in the block, and one for the half of the word. UNIT: columns of a unit, 16 or 32,
    see rounding.in_halves.
    """
    HALF: tl.constexpr = UNIT // 2
    bytes_16 = column % 128 // 32
    word = column % HALF // 4
    if UNIT == 16:
        word += column % 32 // 16 * 2
    code = column % 2 * 2 + column % UNIT // HALF
    half = column % 4 // 2
    return column // 128 * 128 + code * 32 + word * 8 + bytes_16 * 2 + half


@triton.jit
def _times(pair: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return the products of the bfloat16 numbers in the two halves of `pair` and of `factor`, uint32 each."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, $1, $2, c; }",
        "=r,r,r",
        [pair, factor],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _values(
    words: tl.tensor, scales: tl.tensor, n: tl.constexpr, SCALES: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Return the values of code n of the low and of the high 16 bits of each word, divided by POWER: [..., 2].

    scales: each word's scale as it is stored, uint32.
    """
    pair = pair_of(words, n)
    if dtype == tl.bfloat16:
        pair = _times(pair, pair_of_scales(scales, SCALES))
        first = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.join(first, (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))
    else:
        factor = scale_of(scales, SCALES)
        first = (pair << 16).to(tl.float32, bitcast=True) * factor
        return tl.join(first, (pair & 0xFFFF0000).to(tl.float32, bitcast=True) * factor).to(dtype)


@triton.jit
def _operand(words_2RW: tl.tensor, scale_2RU: tl.tensor, SCALES: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return a block of the weight, divided by POWER, [N, 8 * WORDS] in `dtype`, in the order of operand_place.

    words_2RW: uint32 [2, N / 2, WORDS]; first the rows 0 to 7 of each 16, then the rows 8 to 15. scale_2RU: their
    scales as they are stored, [2, N / 2, units].
    """
    ROWS: tl.constexpr = 2 * words_2RW.shape[1]
    UNITS: tl.constexpr = scale_2RU.shape[2]
    WORDS: tl.constexpr = words_2RW.shape[2]
    spread = tl.broadcast_to(scale_2RU.to(tl.uint32)[:, :, :, None], [2, ROWS // 2, UNITS, WORDS // UNITS])
    scales = tl.reshape(spread, [2, ROWS // 2, WORDS])
    even = tl.join(_values(words_2RW, scales, 0, SCALES, dtype), _values(words_2RW, scales, 1, SCALES, dtype))
    odd = tl.join(_values(words_2RW, scales, 2, SCALES, dtype), _values(words_2RW, scales, 3, SCALES, dtype))
    # [half of rows, 16 rows, row of 8, 16 bytes, word of these, half of a word, last bit of the code, first bit]
    values = tl.reshape(tl.join(even, odd), [2, ROWS // 16, 8, WORDS // 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(values, (1, 0, 2, 7, 6, 4, 3, 5)), [ROWS, 8 * WORDS])


@triton.jit
def _by_halves(row_N: tl.tensor) -> tl.tensor:
    """Return N row numbers as [2, N / 2, 1]: first those of rows 0 to 7 of each 16, then those of rows 8 to 15."""
    ROWS: tl.constexpr = row_N.shape[0]
    return tl.reshape(tl.permute(tl.reshape(row_N, [ROWS // 16, 2, 8]), (1, 0, 2)), [2, ROWS // 2, 1])


@triton.jit
def _scales(scales_ptr_2R1: tl.tensor, k: tl.tensor, K: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the stored scales of the 128 columns from k on, [2, N / 2, units]; 0 beyond the last column."""
    unit_11U = k // UNIT + tl.arange(0, 128 // UNIT)[None, None, :]
    return tl.load(scales_ptr_2R1 + unit_11U, mask=unit_11U < K // UNIT, other=0)


@triton.jit
def _plus_block(
    acc_NT: tl.tensor,
    x_ptr_T1: tl.tensor,
    words_ptr_2R1: tl.tensor,
    scale_2RU: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tl.tensor:
    """Return acc_NT plus the product of the 128 columns from k on. IS_WHOLE: every block is within K columns.

    For the other arguments see words_product and _operand.
    """
    word_11W = k // 8 + tl.arange(0, 16)[None, None, :]
    column_1K = k + tl.arange(0, 128)[None, :]
    if IS_WHOLE:
        words_2RW = tl.load(words_ptr_2R1 + word_11W)
        x_TK = tl.load(x_ptr_T1 + column_1K)
    else:
        PADDED: tl.constexpr = (K + 127) // 128 * 128
        words_2RW = tl.load(words_ptr_2R1 + word_11W, mask=word_11W < K // 8, other=0)
        x_TK = tl.load(x_ptr_T1 + column_1K, mask=column_1K < PADDED, other=0.0)
    operand_NK = _operand(words_2RW.to(tl.uint32, bitcast=True), scale_2RU, SCALES, x_TK.dtype)
    return tl.dot(operand_NK, tl.trans(x_TK), acc_NT, input_precision="ieee")


@triton.jit
def words_product(
    x_ptr_T: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_N: tl.tensor,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """Return the matrix product of T rows of x and N rows of codes, fp32 [T, N].

    x_ptr_T: each row's first value, in the order of operand_place; K is rounded up to whole blocks of 128, with zeros.
    codes_ptr, scales_ptr: of a weight, [rows, K / 2] and [rows, K / UNIT], codes aligned to four bytes; row_N: the
    rows. SCALES: the format of the scales. UNIT: the columns that share a scale, see UNIT_COLUMNS. K is a multiple of
    UNIT, and N of 16. BLOCK_K: columns of a step, 128 or 256.
    """
    IS_WHOLE: tl.constexpr = K % BLOCK_K == 0
    # Pointers are computed from rows in their order here, so that the compiler knows their alignment.
    row_2R1 = _by_halves(row_N)
    words_ptr_2R1 = codes_ptr.to(tl.pointer_type(tl.int32)) + row_2R1 * (K // 8)
    scales_ptr_2R1 = scales_ptr + row_2R1 * (K // UNIT)
    acc_NT = tl.zeros([row_N.shape[0], x_ptr_T.shape[0]], tl.float32)
    # Single bytes are not copied ahead to shared memory, so a step loads those of the next one.
    first_2RU = _scales(scales_ptr_2R1, 0, K, UNIT)
    last_2RU = _scales(scales_ptr_2R1, BLOCK_K - 128, K, UNIT)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        acc_NT = _plus_block(acc_NT, x_ptr_T[:, None], words_ptr_2R1, first_2RU, k, K, SCALES, IS_WHOLE)
        first_2RU = _scales(scales_ptr_2R1, k + BLOCK_K, K, UNIT)
        if BLOCK_K > 128:
            acc_NT = _plus_block(acc_NT, x_ptr_T[:, None], words_ptr_2R1, last_2RU, k + 128, K, SCALES, IS_WHOLE)
            last_2RU = _scales(scales_ptr_2R1, k + BLOCK_K + 128, K, UNIT)
    return tl.trans(acc_NT) * POWER
