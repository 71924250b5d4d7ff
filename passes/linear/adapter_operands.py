"""Operands of the adapter_add kernels, and the tiling of a merged linear's members."""

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
    """The arguments of adapter_add, see its reference."""

    y_TN: torch.Tensor
    x_TK: torch.Tensor
    a_SRK: torch.Tensor
    b_SNR: torch.Tensor
    ranks_SM: torch.Tensor
    slots_T: torch.Tensor
    sizes: list[int]


def tiles_of_members(sizes: list[int], width: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Divide each member's results into tiles of `width`, numbered over all members.

    Returns (constexprs, number of tiles). BEGINS, ENDS, FIRST_TILES: for each member its first result, the end of its
    results, and its first tile.
    """
    ends = tuple(accumulate(sizes))
    last_tiles = tuple(accumulate(cdiv(size, width) for size in sizes))
    return {"BEGINS": (0, *ends[:-1]), "ENDS": ends, "FIRST_TILES": (0, *last_tiles[:-1])}, last_tiles[-1]


@triton.jit
def member_of(
    tile: tl.tensor, BEGINS: tl.constexpr, ENDS: tl.constexpr, FIRST_TILES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (member of a tile of WIDTH results, the tile's first result, the member's end). See tiles_of_members."""
    member, begin, end = tile * 0, tile * WIDTH, tile * 0 + ENDS[0]
    for each in tl.static_range(1, len(ENDS)):
        of_later = tile >= FIRST_TILES[each]
        member = tl.where(of_later, each, member)
        begin = tl.where(of_later, BEGINS[each] + (tile - FIRST_TILES[each]) * WIDTH, begin)
        end = tl.where(of_later, ENDS[each], end)
    return member, begin, end
