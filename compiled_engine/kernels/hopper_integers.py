"""Gluon functions that decode integer codes of four bits in registers, for two of Hopper's linear kernels.

A tensor-core instruction takes its left operand from registers: the codes minus their zero point, which 16-bit types
represent exactly. The kernel for few tokens multiplies the result for each 128 columns by the scales, in fp32; the
kernel for many tokens multiplies the left operand by the scales first.

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
def _decoding(dtype: Any) -> str:
    """Return PTX that decodes the 16 codes in the words $8 and $9 to 16-bit values, two in each of $0 to $7.

    A code is or-ed into the lowest bits of the base (see _BASES). Then $10 is subtracted, both of whose halves hold the
    base plus the zero point, which leaves the code minus its zero point.
    """
    base, kind = _BASES[dtype.name]
    lines = [".reg .b32 low, high, shifted;", "prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for i in range(8):
        source = "low" if i < 4 else "high"
        if i % 4:
            lines.append(f"shr.u32 shifted, {source}, {i % 4 * 4};")
            source = "shifted"
        lines.append(f"lop3.b32 ${i}, {source}, 0x000f000f, 0x{base * 0x10001:08x}, 0xea;")
        lines.append(f"sub.rn.{kind} ${i}, ${i}, $10;")
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _eight(dtype: Any) -> list[Any]:
    return [dtype] * 8


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
        dtype=_eight(dtype),
        is_pure=True,
        pack=2,
    )
    low = _side_by_side(values[0], values[1], values[2], values[3], layout)
    return low, _side_by_side(values[4], values[5], values[6], values[7], layout)
