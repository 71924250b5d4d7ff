"""Triton device functions for experts in four bits: codes are decoded in registers, two to a byte.

Codes are in halves (see rounding.in_halves): in each unit of columns, the low bits of the bytes hold the first half,
the high bits the second. So the inputs of either half are neighbours in memory, and products need no shuffles.

In bfloat16 four bytes, a register, become four registers of two values each, without conversions:

- The bits of e2m1, moved to the sign, the low exponent bits and the first mantissa bit, are the value times 2^-126,
  zero and the subnormal 0.5 included. Multiplying by 2^126 times the scale is exact: a value of e2m1 has two
  significant bits and a scale at most four (e4m3; one in e8m0), and bfloat16 holds eight.
- The low bits of 128 count 1, so an integer code or-ed into them adds to 128. Subtracting 128 + zero point is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _shifted(to: str, left: int) -> str:
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, q, {abs(left)}; "


def _e2m1(out: str, operands: str, sign: int, magnitude: int) -> str:
    """Return PTX instructions that decode a register's two e2m1 codes and multiply them by their factors.

    out, operands: names of the registers for the results and of the factors. sign, magnitude: how far the bits of sign
    and magnitude are shifted to the left.
    """
    return (
        f"{_shifted('s', sign)}{_shifted('m', magnitude)}and.b32 m, m, 0x01C001C0; "
        f"lop3.b32 s, s, 0x80008000, m, 0xEA; fma.rn.bf16x2 {out}, s, {operands}, c; "
    )


def _integer(out: str, operands: str, right: int) -> str:
    return f"{_shifted('s', -right)}lop3.b32 s, s, 0x000F000F, m, 0xEA; fma.rn.bf16x2 {out}, s, c, {operands}; "


# Decode four bytes into the registers p0 to p3: low bits of the first two bytes, of the last two, then the high bits.
# First, bytes 0 and 1 go to the low bits of the halves of a register, bytes 2 and 3 above them.
_SPREAD = "prmt.b32 q, codes, 0, 0x3120; "
_DECODE = {
    "e2m1": "mov.b32 c, 0x80008000; "
    + _SPREAD
    + _e2m1("p0", "first", 12, 6)
    + _e2m1("p1", "last", 4, -2)
    + _e2m1("p2", "first", 8, 2)
    + _e2m1("p3", "last", 0, -6),
    "integers": "mov.b32 m, 0x43004300; mov.b32 c, 0x3F803F80; "
    + _SPREAD
    + _integer("p0", "first", 0)
    + _integer("p1", "last", 8)
    + _integer("p2", "first", 4)
    + _integer("p3", "last", 12),
}


def _assembly(packed: str) -> str:
    # Bytes of a thread may belong to two rows, so each has its own operand: of the first two bytes, of the last two.
    inputs = "mov.b32 codes, $4; prmt.b32 first, $5, $6, 0x7610; prmt.b32 last, $7, $8, 0x7610; "
    outputs = "".join(f"mov.b32 ${i}, p{i}; " for i in range(4))
    return "{ .reg .b32 codes, first, last, q, s, m, c, p0, p1, p2, p3; " + inputs + _DECODE[packed] + outputs + "}"


# Functions of four bytes and of an operand for each, with the same number in both halves of its register.
OF_E2M1, OF_INTEGERS = tl.constexpr(_assembly("e2m1")), tl.constexpr(_assembly("integers"))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")
# Added to an exponent, shifted into bfloat16's place and in both halves of a register: 126 + 127 - 127 - POWER.
EXPONENTS, POWER = tl.constexpr(62 * 0x00800080), tl.constexpr(2.0**64)
LESS_128 = tl.constexpr(0xC300C300 - 2**32)  # -128 in both halves


@triton.jit
def halves_of(
    codes_NB: tl.tensor, operand_NB: tl.tensor, PACKED: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the values of the low and of the high bits of packed codes, [N, B] each, in `dtype`.

    operand_NB: for each byte the operand from factor_of (e2m1) or from zero_of (integers).
    """
    if dtype == tl.bfloat16:
        asm: tl.constexpr = OF_E2M1 if PACKED == "e2m1" else OF_INTEGERS
        return tl.inline_asm_elementwise(
            asm, _REGISTERS, [codes_NB, operand_NB], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return _values(codes_NB & 15, operand_NB, PACKED, dtype), _values(codes_NB >> 4, operand_NB, PACKED, dtype)


@triton.jit
def _values(codes: tl.tensor, operand: tl.tensor, PACKED: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    if PACKED == "e2m1":
        bits = ((codes & 8).to(tl.uint32) << 28) | ((codes & 7).to(tl.uint32) << 22)
        return (bits.to(tl.float32, bitcast=True) * 2.0**126 * operand).to(dtype)
    else:
        return (codes.to(tl.float32) - operand).to(dtype)


@triton.jit
def factor_of(scales: tl.tensor, SCALES: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return what `halves_of` takes as `operand_NB` for weights in e2m1: the stored scales divided by POWER.

    SCALES: the format of the scales, see experts_codes.constants_of. Scales in e8m0 are exact from 2^-61 to 2^65.
    """
    if dtype == tl.bfloat16:
        return pair_of_scales(scales.to(tl.int32), SCALES)
    elif SCALES == "e4m3":
        return scale_of(scales, SCALES) * 2.0**-126
    else:
        return _power(scales) / POWER


@triton.jit
def pair_of_scales(scales: tl.tensor, SCALES: tl.constexpr) -> tl.tensor:
    """Return stored scales (int32 or uint32) times 2^62, in bfloat16 in both halves of a register."""
    if SCALES == "e4m3":
        bits = scale_of(scales, SCALES).to(tl.uint32, bitcast=True)
        return (bits & 0xFFFF0000) | (bits >> 16)
    else:
        return scales * 0x00800080 + EXPONENTS


@triton.jit
def scale_of(scales: tl.tensor, SCALES: tl.constexpr) -> tl.tensor:
    """Return stored scales times 2^62, in fp32."""
    if SCALES == "e4m3":
        # The bits of e4m3, moved to the sign, the low exponent bits and the first mantissa bits, are the scale times
        # 2^-120, subnormal scales included.
        scales = scales.to(tl.uint32)
        bits = ((scales & 0x80) << 24) | ((scales & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 2.0**120 * 2.0**62
    else:
        return ((scales + 62) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _power(scales: tl.tensor) -> tl.tensor:
    """Return 2^(scale - 127) in fp32: the scale is the exponent's bits, except that 0 is a subnormal."""
    scales = scales.to(tl.uint32)
    return tl.where(scales == 0, 1 << 22, scales << 23).to(tl.float32, bitcast=True)


@triton.jit
def zero_of(zeros: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the operand of `halves_of` for zero points of integers."""
    if dtype == tl.bfloat16:
        return zeros.to(tl.int32) * 0x00010001 + LESS_128
    else:
        return zeros.to(tl.float32)


@triton.jit
def pair_of(words: tl.tensor, n: tl.constexpr) -> tl.tensor:
    """Return code n of both 16-bit halves of each word as two bfloat16 numbers, times 2^-126.

    words: uint32, each half with four e2m1 codes. The number of a word's low half is in the low bits of the result.
    """
    signs = words << (12 - 4 * n)
    values = words << (6 - 4 * n) if n < 2 else words >> (4 * n - 6)
    return (signs & 0x80008000) | (values & 0x01C001C0)


@triton.jit
def low_columns(BYTES: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the columns whose codes are in the low bits of BYTES bytes, from a unit's start on.

    The columns of the high bits are UNIT / 2 later.
    """
    byte_B = tl.arange(0, BYTES)
    return byte_B // (UNIT // 2) * UNIT + byte_B % (UNIT // 2)


@triton.jit
def _scales(
    scales_ptr_N: tl.tensor, k: tl.tensor, K: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr
) -> tl.tensor:
    """Return N rows' scales of GROUPS tiles from column k on, as stored, [N, GROUPS]; 0 beyond the last column."""
    group_G = k // TILE_COLUMNS + tl.arange(0, GROUPS)
    mask_1G = (group_G * TILE_COLUMNS < K)[None, :]
    return tl.load(scales_ptr_N[:, None] + group_G[None, :], mask=mask_1G, other=0)


@triton.jit
def packed_product(
    x_ptr_T: tl.tensor,
    codes_ptr_N: tl.tensor,
    scales_ptr_N: tl.tensor,
    zeros_ptr_N: tl.tensor,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """Return the matrix product of T rows of x and N rows of codes, fp32 [T, N].

    x_ptr_T: each row's first value. codes_ptr_N, scales_ptr_N: each row's first byte and scale; zeros_ptr_N: each row's
        first zero point, or None if all zero points are ZERO.
    PACKED: "e2m1" (MXFP4, NVFP4) or "integers". SCALES: see factor_of. UNIT: columns of a unit, see the module.
    BLOCK_K: columns of a step, whole units; with integers TILE_COLUMNS is a multiple of it, or 0 for whole rows.
    """
    TOKENS: tl.constexpr = x_ptr_T.shape[0]
    ROWS: tl.constexpr = codes_ptr_N.shape[0]
    BYTES: tl.constexpr = BLOCK_K // 2
    HAS_FACTORS: tl.constexpr = PACKED == "e2m1"
    dtype: tl.constexpr = x_ptr_T.dtype.scalar.element_ty
    byte_B = tl.arange(0, BYTES)
    low_B = low_columns(BYTES, UNIT)
    # Rows of codes stand on the left, where tensor cores take them from the registers in which they are decoded.
    acc_NT = tl.zeros([ROWS, TOKENS], tl.float32)
    if HAS_FACTORS:
        GROUPS: tl.constexpr = BLOCK_K // TILE_COLUMNS
        scale_NG = _scales(scales_ptr_N, 0, K, TILE_COLUMNS, GROUPS)
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
        if HAS_FACTORS:
            operand_NG1 = factor_of(scale_NG, SCALES, dtype)[:, :, None]
            operand_NB = tl.reshape(tl.broadcast_to(operand_NG1, [ROWS, GROUPS, TILE_COLUMNS // 2]), [ROWS, BYTES])
            # Single bytes are not copied ahead to shared memory, so the next step's are loaded here. Those of later
            # steps would make the compiler copy nothing ahead.
            scale_NG = _scales(scales_ptr_N, k + BLOCK_K, K, TILE_COLUMNS, GROUPS)
        elif zeros_ptr_N is None:
            operand_NB = tl.broadcast_to(zero_of(tl.full([1, 1], ZERO, tl.int32), dtype), [ROWS, BYTES])
        else:
            zero_N = tl.load(zeros_ptr_N + (k // TILE_COLUMNS if TILE_COLUMNS > 0 else 0))
            operand_NB = tl.broadcast_to(zero_of(zero_N, dtype)[:, None], [ROWS, BYTES])
        low_NB, high_NB = halves_of(codes_NB, operand_NB, PACKED, dtype)
        IS_SUM: tl.constexpr = HAS_FACTORS or TILE_COLUMNS == 0
        product_NT = acc_NT if IS_SUM else tl.zeros_like(acc_NT)
        product_NT = tl.dot(low_NB, tl.trans(low_TB), product_NT, input_precision="ieee")
        product_NT = tl.dot(high_NB, tl.trans(high_TB), product_NT, input_precision="ieee")
        if IS_SUM:
            acc_NT = product_NT
        else:
            acc_NT += product_NT * tl.load(scales_ptr_N + k // TILE_COLUMNS)[:, None]
    y_TN = tl.trans(acc_NT)
    if HAS_FACTORS:
        y_TN *= POWER
    elif TILE_COLUMNS == 0:
        y_TN *= tl.load(scales_ptr_N)[None, :]
    return y_TN
