"""Chooses the tiles of the Triton kernels for wide heads, which have more than 256 elements.

A program's registers hold the sums of all elements of its rows, and shared memory holds whole keys and values. So tiles
of wide heads have few rows and keys. They fit on every GPU that the backend accepts, in every kernel. For prompts,
triton_prefill.py has larger ones where shared memory is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from compiled_engine.attention.backends.triton_tile import tail_of
from compiled_engine.kernels.launch_arguments import next_power_of_2

WIDEST_NARROW = 256


def is_wide(head_dim: int) -> bool:
    return head_dim > WIDEST_NARROW


@cache
def tile_of_head(head_dim: int) -> int:
    """Return TILE_D, the number of elements of a head's tile: a power of two. The elements beyond are the head's tail.

    Only a wide head has a tail: if its size is no power of two, and the tail's tile is smaller than the first. A head
    of 576 elements has tiles of 512 and 64, one of 320 has tiles of 256 and 64, and one of 448 has a tile of 512.
    """
    whole = next_power_of_2(head_dim)
    if is_wide(head_dim) and tail_of(head_dim, whole // 2) < whole // 2:
        return whole // 2
    return whole


def most_rows(element_size: int) -> int:
    """Return the largest number of rows of a query tile for wide heads with elements of this size in bytes."""
    return 16 if element_size == 4 else 32


@dataclass(frozen=True)
class WideTiles:
    """The number of keys of a tile, and the options with which a kernel is compiled and launched."""

    keys: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor


@cache
def wide_tiles(element_size: int, rows: int) -> WideTiles:
    """Return the tiles of a kernel for wide heads with elements of this size in bytes. rows: rows of a query tile.

    In fp32, queries, keys and values of one stage take most of the shared memory of the smallest GPUs. More than four
    warps would compute the scores of 16 rows twice.
    """
    if element_size == 4:
        return WideTiles(keys=16, num_warps=8, num_stages=1, programs=1)
    if rows <= 16:
        return WideTiles(keys=16, num_warps=4, num_stages=2, programs=2)
    return WideTiles(keys=16, num_warps=8, num_stages=2, programs=1)
