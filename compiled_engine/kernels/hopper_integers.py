"""Gluon steps of Hopper's linear for integer codes of four bits, which are decoded in registers.

A tensor-core product takes its left operand from registers: the differences of 128 columns of codes and their zero
point, which 16-bit types hold exactly. The product is scaled and added to the sum in fp32.

Codes are stored in blocks of 128 columns, 16 words of 32 bits a block: word w holds columns w, 16 + w, ..., 112 + w,
the first in the lowest bits. The words that a thread reads thus become its elements of the left operand without an
exchange between threads.
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
    """Return the layout of boxes [..., rows, WORDS] of codes in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def row_layout(bits: int, rank: int) -> Any:
    """Return the layout of boxes [..., rows] of scales or zero points in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def base_of(dtype: Any) -> int:
    """Return the bits of the number to which codes are added, twice."""
    return _BASES[dtype.name][0] * 0x10001


@gluon.constexpr_function
def _decoding(dtype: Any) -> str:
    """Return PTX that decodes the 16 codes of two words, $8 and $9, to values of 16 bits, two in each of $0 to $7.

    Both halves of $10 hold the base (see _BASES) plus the zero point, which is subtracted.
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
    """Return [ROWS, 64] of four neighbouring [ROWS, 16]."""
    rows: gl.constexpr = a.shape[0]
    joined = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.convert_layout(joined.permute((0, 3, 2, 1)).reshape([rows, 64]), layout)


@gluon.jit
def decoded(words, zeros, dtype: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of a block's codes, its first and its last 64 columns, each [ROWS, 64] of a 16-bit type.

    words: [ROWS, WORDS]. zeros: int32 [ROWS, 1]; both halves hold the base (see _BASES) plus the zero point.
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
