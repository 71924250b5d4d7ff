"""Triton device functions for experts in four bits: codes are decoded in registers, two to a byte.

Codes are in halves (see rounding.in_halves): in each unit of columns, the low bits of the bytes hold the first half,
the high bits the second. So the inputs of either half are neighbours in memory, and products need no shuffles.

In bfloat16 four bytes, a register, become four registers of two values each, without conversions:

- The bits of e2m1, moved to the sign, the low exponent bits and the first mantissa bit, are the value times 2^-126,
  zero and the subnormal 0.5 included. Multiplying by 2^126 times the scale, a power of two, is exact.
- The low bits of 128 count 1, so an integer code or-ed into them adds to 128. Subtracting 128 + zero point is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _shifted(to: str, left: int) -> str:
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, q, {abs(left)}; "


def _e2m1(out: str, sign: int, magnitude: int) -> str:
    """sign, magnitude: how far to the left their bits are moved."""
    return (
        f"{_shifted('s', sign)}{_shifted('m', magnitude)}and.b32 m, m, 0x01C001C0; "
        f"lop3.b32 s, s, 0x80008000, m, 0xEA; fma.rn.bf16x2 {out}, s, operand, c; "
    )


def _integer(out: str, right: int) -> str:
    return f"{_shifted('s', -right)}lop3.b32 s, s, 0x000F000F, m, 0xEA; fma.rn.bf16x2 {out}, s, c, operand; "


# Decode four bytes into the registers p0 to p3: low bits of the first two bytes, of the last two, then the high bits.
# First, bytes 0 and 1 go to the low bits of the halves of a register, bytes 2 and 3 above them.
_SPREAD = "prmt.b32 q, codes, 0, 0x3120; "
_DECODE = {
    "e2m1": "mov.b32 c, 0x80008000; "
    + _SPREAD
    + _e2m1("p0", 12, 6)
    + _e2m1("p1", 4, -2)
    + _e2m1("p2", 8, 2)
    + _e2m1("p3", 0, -6),
    "integers": "mov.b32 m, 0x43004300; mov.b32 c, 0x3F803F80; "
    + _SPREAD
    + _integer("p0", 0)
    + _integer("p1", 8)
    + _integer("p2", 4)
    + _integer("p3", 12),
}


def _assembly(packed: str, size: int) -> str:
    """Return the function of four bytes and of an operand for each; only the first operand is used.

    size: bytes of a result. The results of low bits come first, then those of high bits.
    """
    if size == 2:
        count, results = 4, "".join(f"mov.b32 ${i}, p{i}; " for i in range(4))
    else:
        count = 8
        results = "".join(f"shl.b32 ${2 * i}, p{i}, 16; and.b32 ${2 * i + 1}, p{i}, 0xFFFF0000; " for i in range(4))
    inputs = f"mov.b32 codes, ${count}; mov.b32 operand, ${count + 1}; "
    return "{ .reg .b32 codes, operand, q, s, m, c, p0, p1, p2, p3; " + inputs + _DECODE[packed] + results + "}"


E2M1_PAIRS, E2M1_ALONE = tl.constexpr(_assembly("e2m1", 2)), tl.constexpr(_assembly("e2m1", 4))
INTEGER_PAIRS, INTEGERS_ALONE = tl.constexpr(_assembly("integers", 2)), tl.constexpr(_assembly("integers", 4))
OF_PAIRS, OF_ALONE = (tl.constexpr(",".join(["=r"] * count + ["r"] * 5)) for count in (4, 8))
# Added to an exponent, shifted into bfloat16's place and in both halves of a register: 126 + 127 - 127 - POWER.
EXPONENTS, POWER = tl.constexpr(62 * 0x00800080), tl.constexpr(2.0**64)
LESS_128 = tl.constexpr(0xC300C300 - 2**32)  # -128 in both halves


@triton.jit
def halves_of(
    codes_NB: tl.tensor, operand_NB: tl.tensor, PACKED: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the values of the low and of the high bits of packed codes, [N, B] each, in this dtype.

    operand_NB: the factor of e2m1, or the zero point of integers, from one of the functions below.
    """
    if dtype == tl.bfloat16:
        asm: tl.constexpr = E2M1_PAIRS if PACKED == "e2m1" else INTEGER_PAIRS
        return tl.inline_asm_elementwise(
            asm, OF_PAIRS, [codes_NB, operand_NB], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return _values(codes_NB & 15, operand_NB, PACKED, dtype), _values(codes_NB >> 4, operand_NB, PACKED, dtype)


@triton.jit
def wide_halves_of(
    codes_NB: tl.tensor, operand_NB: tl.tensor, PACKED: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the values of `halves_of` in fp32."""
    if dtype == tl.bfloat16:
        asm: tl.constexpr = E2M1_ALONE if PACKED == "e2m1" else INTEGERS_ALONE
        return tl.inline_asm_elementwise(
            asm, OF_ALONE, [codes_NB, operand_NB], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    else:
        return halves_of(codes_NB, operand_NB, PACKED, tl.float32)


@triton.jit
def _values(codes: tl.tensor, operand: tl.tensor, PACKED: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    if PACKED == "e2m1":
        bits = ((codes & 8).to(tl.uint32) << 28) | ((codes & 7).to(tl.uint32) << 22)
        return (bits.to(tl.float32, bitcast=True) * 2.0**126 * operand).to(dtype)
    else:
        return (codes.to(tl.float32) - operand).to(dtype)


@triton.jit
def factor_of(scales: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the operand of `halves_of` for scales of e2m1, divided by POWER. Scales from 2^-61 to 2^65 are exact."""
    if dtype == tl.bfloat16:
        return scales.to(tl.int32) * 0x00800080 + EXPONENTS
    else:
        return _power(scales) / POWER


@triton.jit
def _power(scales: tl.tensor) -> tl.tensor:
    """Return 2^(scale - 127) in fp32: the scale is the exponent's bits, except that 0 is a subnormal."""
    scales = scales.to(tl.uint32)
    return tl.where(scales == 0, 1 << 22, scales << 23).to(tl.float32, bitcast=True)


@triton.jit
def zero_of(zeros: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the operand for zero points of integers."""
    if dtype == tl.bfloat16:
        return zeros.to(tl.int32) * 0x00010001 + LESS_128
    else:
        return zeros.to(tl.float32)


@triton.jit
def low_columns(BYTES: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the columns of the low bits of bytes from a unit's start on; high bits are UNIT / 2 columns later."""
    byte_B = tl.arange(0, BYTES)
    return byte_B // (UNIT // 2) * UNIT + byte_B % (UNIT // 2)


@triton.jit
def packed_product(
    x_ptr_T: tl.tensor,
    codes_ptr_N: tl.tensor,
    scales_ptr_N: tl.tensor,
    zeros_ptr_N: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """Return the products of rows of x and rows of codes, fp32 [T, N].

    x_ptr_T: each row's first value. codes_ptr_N, scales_ptr_N: each row's first byte and scale; zeros_ptr_N: its first
        zero point, or None for ZERO alone.
    BLOCK_K: columns of a step, whole units; with integers TILE_COLUMNS is a multiple of it, or 0 for whole rows.
    """
    TOKENS: tl.constexpr = x_ptr_T.shape[0]
    ROWS: tl.constexpr = codes_ptr_N.shape[0]
    BYTES: tl.constexpr = BLOCK_K // 2
    # Few tokens are the 16 rows of a small product, of which a thread reads four bytes of codes at once. With many
    # tokens, the 64 rows of a large product are codes that are decoded in registers.
    ROWS_FIRST: tl.constexpr = TOKENS >= 64
    BY_EXPONENTS: tl.constexpr = PACKED == "e2m1"
    dtype: tl.constexpr = x_ptr_T.dtype.scalar.element_ty
    byte_B = tl.arange(0, BYTES)
    low_B = low_columns(BYTES, UNIT)
    acc = tl.zeros([ROWS, TOKENS] if ROWS_FIRST else [TOKENS, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        codes_ptr_NB = codes_ptr_N[:, None] + (k // 2 + byte_B)[None, :]
        low_ptr_TB = x_ptr_T[:, None] + (k + low_B)[None, :]
        if K % BLOCK_K == 0:
            codes_NB = tl.load(codes_ptr_NB)
            low_TB = tl.load(low_ptr_TB)
            high_TB = tl.load(low_ptr_TB + UNIT // 2)
        else:
            inside_1B = (k // 2 + byte_B < K // 2)[None, :]
            codes_NB = tl.load(codes_ptr_NB, mask=inside_1B, other=0)
            low_TB = tl.load(low_ptr_TB, mask=inside_1B, other=0.0)
            high_TB = tl.load(low_ptr_TB + UNIT // 2, mask=inside_1B, other=0.0)
        if BY_EXPONENTS:
            GROUPS: tl.constexpr = BLOCK_K // TILE_COLUMNS
            group_G = k // TILE_COLUMNS + tl.arange(0, GROUPS)
            if K % BLOCK_K == 0:
                scale_NG = tl.load(scales_ptr_N[:, None] + group_G[None, :])
            else:
                mask_1G = (group_G * TILE_COLUMNS < K)[None, :]
                scale_NG = tl.load(scales_ptr_N[:, None] + group_G[None, :], mask=mask_1G, other=0)
            operand_NG1 = factor_of(scale_NG, dtype)[:, :, None]
            operand_NB = tl.reshape(tl.broadcast_to(operand_NG1, [ROWS, GROUPS, TILE_COLUMNS // 2]), [ROWS, BYTES])
        elif zeros_ptr_N is None:
            operand_NB = tl.broadcast_to(zero_of(tl.full([1, 1], ZERO, tl.int32), dtype), [ROWS, BYTES])
        else:
            zero_N = tl.load(zeros_ptr_N + (k // TILE_COLUMNS if TILE_COLUMNS > 0 else 0))
            operand_NB = tl.broadcast_to(zero_of(zero_N, dtype)[:, None], [ROWS, BYTES])
        low_NB, high_NB = halves_of(codes_NB, operand_NB, PACKED, dtype)
        into = acc if BY_EXPONENTS or TILE_COLUMNS == 0 else tl.zeros_like(acc)
        if ROWS_FIRST:
            into = tl.dot(low_NB, tl.trans(low_TB), into, input_precision="ieee")
            into = tl.dot(high_NB, tl.trans(high_TB), into, input_precision="ieee")
        else:
            into = tl.dot(low_TB, tl.trans(low_NB), into, input_precision="ieee")
            into = tl.dot(high_TB, tl.trans(high_NB), into, input_precision="ieee")
        if BY_EXPONENTS or TILE_COLUMNS == 0:
            acc = into
        else:
            scale_N = tl.load(scales_ptr_N + k // TILE_COLUMNS)
            acc += into * (scale_N[:, None] if ROWS_FIRST else scale_N[None, :])
    y_TN = tl.trans(acc) if ROWS_FIRST else acc
    if BY_EXPONENTS:
        y_TN *= POWER
    elif TILE_COLUMNS == 0:
        y_TN *= tl.load(scales_ptr_N)[None, :]
    return y_TN


@triton.jit
def no_sums(ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return zeros for `add_products`: with e2m1, whose scales are exact factors of values, one for each byte; with
    integers, one for each unit."""
    return tl.zeros([ROWS, BLOCK_K // 2 if PACKED == "e2m1" else BLOCK_K // UNIT], tl.float32)


@triton.jit
def total_of(sums_NS: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """Return the products of whole rows."""
    total_N = tl.sum(sums_NS, 1)
    return total_N * POWER if PACKED == "e2m1" else total_N


@triton.jit
def add_products(
    sums_NS: tl.tensor,
    codes_NB: tl.tensor,
    low_x_B: tl.tensor,
    high_x_B: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    tile_N: tl.tensor,
    mask_N: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return the sums plus the products of a row of x and rows of codes, both from column k on.

    low_x_B, high_x_B: fp32, the inputs of the low and of the high bits. tile_N: rows of scales; mask_N: whether they
    exist. dtype: in which codes are decoded.
    """
    ROWS: tl.constexpr = codes_NB.shape[0]
    BYTES: tl.constexpr = codes_NB.shape[1]
    UNITS: tl.constexpr = 2 * BYTES // UNIT
    column_U = k + tl.arange(0, UNITS) * UNIT
    if TILE_COLUMNS == 0:
        place_NU = tile_N[:, None] + tl.zeros([1, UNITS], tl.int32)
    else:
        place_NU = tile_N[:, None] * ((K + TILE_COLUMNS - 1) // TILE_COLUMNS) + (column_U // TILE_COLUMNS)[None, :]
    mask_NU = mask_N[:, None] & (column_U < K)[None, :]
    scale_NU = tl.load(scales_ptr + place_NU, mask=mask_NU, other=0)
    if PACKED == "e2m1":
        operand_NU = factor_of(scale_NU, dtype)
    elif zeros_ptr is None:
        operand_NU = tl.broadcast_to(zero_of(tl.full([1, 1], ZERO, tl.int32), dtype), [ROWS, UNITS])
    else:
        operand_NU = zero_of(tl.load(zeros_ptr + place_NU, mask=mask_NU, other=0), dtype)
    operand_NB = tl.reshape(tl.broadcast_to(operand_NU[:, :, None], [ROWS, UNITS, UNIT // 2]), [ROWS, BYTES])
    low_NB, high_NB = wide_halves_of(codes_NB, operand_NB, PACKED, dtype)
    if PACKED == "e2m1":
        sums_NS += low_NB * low_x_B[None, :]
        sums_NS += high_NB * high_x_B[None, :]
    else:
        products_NB = low_NB * low_x_B[None, :] + high_NB * high_x_B[None, :]
        sums_NS += tl.sum(tl.reshape(products_NB, [ROWS, UNITS, UNIT // 2]), 2) * scale_NU
    return sums_NS
