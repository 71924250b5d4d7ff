"""Operands of the adapter_add kernels, and the division of a merged linear into tiles. Members: the linears merged."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv

# Elements per load.
VECTOR = tl.constexpr(8)


class Operands(NamedTuple):
    """The arguments of the op adapter_add; adapter_add.reference describes them."""

    y_TN: torch.Tensor
    x_TK: torch.Tensor
    a_SRK: torch.Tensor
    b_SNR: torch.Tensor
    ranks_SM: torch.Tensor
    slots_T: torch.Tensor
    sizes: list[int]


def tiles_of_members(sizes: list[int], width: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Divide the outputs of each member of a merged linear into tiles of `width`, numbered over all members.

    sizes: outputs of each member. Returns (constexprs of the kernels, number of tiles). The constexprs have an entry
    per member: BEGINS and ENDS are the bounds of its outputs in the merged result, FIRST_TILES its first tile.
    """
    ends = tuple(accumulate(sizes))
    last_tiles = tuple(accumulate(cdiv(size, width) for size in sizes))
    return {"BEGINS": (0, *ends[:-1]), "ENDS": ends, "FIRST_TILES": (0, *last_tiles[:-1])}, last_tiles[-1]


@triton.jit
def member_of(
    tile: tl.tensor, BEGINS: tl.constexpr, ENDS: tl.constexpr, FIRST_TILES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (index of the member that a tile belongs to, the tile's first output, the end of the member's outputs).

    tile: number of the tile. BEGINS, ENDS, FIRST_TILES: see tiles_of_members. WIDTH: outputs per tile.
    """
    member, begin, end = tile * 0, tile * WIDTH, tile * 0 + ENDS[0]
    for each in tl.static_range(1, len(ENDS)):
        of_later = tile >= FIRST_TILES[each]
        member = tl.where(of_later, each, member)
        begin = tl.where(of_later, BEGINS[each] + (tile - FIRST_TILES[each]) * WIDTH, begin)
        end = tl.where(of_later, ENDS[each], end)
    return member, begin, end
