"""Gluon functions that decode integer codes of four bits in registers, for two of Hopper's linear kernels.

A tensor-core instruction takes its left operand from registers: the codes minus their zero point, which 16-bit types
represent exactly. The kernel for few tokens multiplies the result for each 128 columns by the scales, in fp32; the
kernel for many tokens multiplies the left operand by the scales first, with 16-bit instructions: a scale is the sum of
two numbers of 16 bits.

A row of codes is stored in blocks of 128 columns, 16 words of 32 bits per block. Word w has the codes of the columns w,
16 + w, ..., 112 + w, the first in the lowest bits. In this order a thread reads the words that contain its own elements
of the left operand, so threads exchange nothing.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Words of a row of a block.
WORDS = gl.constexpr(16)
# Bits to which a code is added as the lowest ones, and instruction type: 128 in bfloat16, 1024 in float16.
_BASES = {"bf16": (0x4300, "bf16x2"), "fp16": (0x6400, "f16x2")}


@gluon.constexpr_function
def word_layout(rank: int) -> Any:
    """Return the shared-memory layout of tiles [..., rows, WORDS] of codes. rank: number of dimensions of a tile."""
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def row_layout(bits: int, rank: int) -> Any:
    """Return the shared-memory layout of tiles [..., rows] of scales or zero points.

    bits: of an element. rank: number of dimensions of a tile.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def base_of(dtype: Any) -> int:
    """Return a 32-bit word whose two halves both hold the bits of the number to which codes are added, see _BASES."""
    return _BASES[dtype.name][0] * 0x10001


@gluon.constexpr_function
def _four_codes(dtype: Any, source: str, first: int, zero: str) -> list[str]:
    """Return PTX that decodes four codes of each half of the register `source` to the operands first to first + 3.

    A code is or-ed into the lowest bits of the base (see _BASES). Then the register `zero` is subtracted, both of whose
    halves hold the base plus the zero point, which leaves the code minus its zero point.
    """
    base, kind = _BASES[dtype.name]
    lines = []
    for i in range(4):
        codes = source
        if i:
            lines.append(f"shr.u32 shifted, {source}, {i * 4};")
            codes = "shifted"
        lines.append(f"lop3.b32 ${first + i}, {codes}, 0x000f000f, 0x{base * 0x10001:08x}, 0xea;")
        lines.append(f"sub.rn.{kind} ${first + i}, ${first + i}, {zero};")
    return lines


@gluon.constexpr_function
def _decoding(dtype: Any) -> str:
    """Return PTX that decodes the 16 codes in the words $8 and $9 to 16-bit values, two in each of $0 to $7.

    $10: base plus zero point, see _four_codes.
    """
    lines = [".reg .b32 low, high, shifted;", "prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    lines += _four_codes(dtype, "low", 0, "$10") + _four_codes(dtype, "high", 4, "$10")
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _scaled_decoding(dtype: Any, half: int) -> str:
    """Return PTX that decodes half of the codes in the words $4 and $5, times their scale, two in each of $0 to $3.

    half: 0 for the codes of the first 64 columns, 1 for those of the last. $6: base plus zero point, see _four_codes.
    $8, $10: both 16-bit halves hold the first, or the second, part of the scale.
    """
    _, kind = _BASES[dtype.name]
    lines = [".reg .b32 packed, shifted, rest;", f"prmt.b32 packed, $4, $5, {('0x5410', '0x7632')[half]};"]
    lines += _four_codes(dtype, "packed", 0, "$6")
    for i in range(4):
        lines.append(f"mul.rn.{kind} rest, ${i}, $10;")
        lines.append(f"fma.rn.{kind} ${i}, ${i}, $8, rest;")
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _in_two(dtype: Any) -> str:
    """Return PTX that rounds the fp32 scale $2 to 16 bits, and the difference too: in both halves of $0 and of $1."""
    kind = _BASES[dtype.name][1]
    lines = [".reg .b16 rounded, same;", ".reg .f32 value;", f"cvt.rn.{kind}.f32 $0, $2, $2;"]
    if kind == "bf16x2":
        lines.append("and.b32 $1, $0, 0xffff0000; mov.b32 value, $1;")
    else:
        lines.append("mov.b32 {rounded, same}, $0; cvt.f32.f16 value, rounded;")
    lines.append(f"sub.rn.f32 value, $2, value; cvt.rn.{kind}.f32 $1, value, value;")
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _times(dtype: Any, number: int) -> list[Any]:
    return [dtype] * number


@gluon.jit
def _side_by_side(a, b, c, d, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return four tensors [ROWS, 16], concatenated along the columns to [ROWS, 64], in the layout `layout`."""
    rows: gl.constexpr = a.shape[0]
    joined = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.convert_layout(joined.permute((0, 3, 2, 1)).reshape([rows, 64]), layout)


@gluon.jit
def decoded(words, zeros, dtype: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block's codes minus their zero points: (first 64 columns, last 64 columns), [ROWS, 64] in `dtype` each.

    words: [ROWS, WORDS], the block's codes. zeros: int32 [ROWS, 1]; both 16-bit halves hold the base (see _BASES) plus
    the row's zero point. layout: of the results.
    """
    values = gl.inline_asm_elementwise(
        _decoding(dtype),
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, zeros],
        dtype=_times(dtype, 8),
        is_pure=True,
        pack=2,
    )
    low = _side_by_side(values[0], values[1], values[2], values[3], layout)
    return low, _side_by_side(values[4], values[5], values[6], values[7], layout)


@gluon.jit
def in_two_parts(scales, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return two int32 tensors for fp32 scales: both 16-bit halves hold the scale in `dtype`, and what it lacks.

    The sum of both has twice the bits of `dtype`; in float16, not less than 2^-24.
    """
    return gl.inline_asm_elementwise(
        _in_two(dtype), "=r,=r,f", [scales], dtype=_times(gl.int32, 2), is_pure=True, pack=1
    )


@gluon.jit
def decoded_and_scaled(  # type: ignore[no-untyped-def]
    words, zeros, scales, rests, dtype: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr
):
    """Return half of a block's codes, minus their zero points and times their scales: [ROWS, 64] in `dtype`.

    words, zeros, layout: see `decoded`. scales, rests: int32 [ROWS, 1], see in_two_parts. HALF: 0 for the first 64
    columns, 1 for the last. A code's products with both parts of its scale are added with a single rounding, so the
    result is the rounded product of code and scale, except if that is within 2^-7 of a rounding step of a tie.
    """
    values = gl.inline_asm_elementwise(
        _scaled_decoding(dtype, HALF),
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [words, zeros, scales, rests],
        dtype=_times(dtype, 4),
        is_pure=True,
        pack=2,
    )
    return _side_by_side(values[0], values[1], values[2], values[3], layout)
