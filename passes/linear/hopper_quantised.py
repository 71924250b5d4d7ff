"""Says which quantised linears Hopper's kernels support, and chooses their tile sizes by a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from compiled_engine.kernels.launch_arguments import cdiv
from compiled_engine.passes.linear.hopper_linear import (
    BUSY,
    MOST_COLUMNS,
    SHARED_MEMORY,
    TOKEN_BUCKETS,
    HopperTiles,
)
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.quantisation import LinearScheme

# Columns per tensor-core product of 8-bit codes, and so the only supported columns per scale besides whole rows.
COLUMNS = 128
# Most columns of tensor-core products that fit the registers of three groups of warps.
MOST_OF_THREE = 64


def why_not_on_hopper(num_rows: int, k: int, silu_mul: bool, scheme: LinearScheme, dtype: torch.dtype) -> str | None:
    """Return why Hopper's kernels do not support a linear of 8-bit codes; None if they do.

    num_rows, k: sizes of the weight. silu_mul: num_rows counts gate and up together. dtype: dtype of the results.
    """
    if scheme.inputs is None:
        return "its inputs are not rounded"
    if scheme.weight.is_integer:
        return f"its codes are {scheme.weight.element}"
    input_columns = 0 if scheme.inputs.static else scheme.inputs.columns
    if not {scheme.weight.columns, input_columns} <= {0, COLUMNS}:
        return f"its scales are not of {COLUMNS} columns or whole rows ({scheme})"
    even = 16 if silu_mul else 8
    if k % 16 or num_rows % even:
        return f"its sizes [{num_rows}, {k}] are no multiples of {even} and 16"
    return None if dtype.itemsize == 2 else f"its results are {str(dtype).removeprefix('torch.')}"


@cache
def quantised_tiles(
    num_tokens: int, num_rows: int, k: int, silu_mul: bool, num_multiprocessors: int, divides: bool = True
) -> HopperTiles:
    """Return the tile sizes for a linear of 8-bit codes with `num_tokens` tokens and a weight [num_rows, k].

    The tiles are the largest that keep enough multiprocessors busy, with as many stages of the ring buffer as fit the
    shared memory. silu_mul: num_rows counts gate and up together. divides: tiles may divide the columns into parts.
    """
    tokens = max(8, next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket))
    # Two programs on a multiprocessor have registers for half the columns.
    most = MOST_COLUMNS if cdiv(num_rows, 32) <= num_multiprocessors else MOST_COLUMNS // 2
    two_parts = divides and 2 * tokens <= most and k % (2 * COLUMNS) == 0
    forms = [(groups, 1) for groups in (3, 2, 1) if groups < 3 or tokens <= MOST_OF_THREE]
    forms += [(1, 2)] if two_parts else []
    programs = {(groups, parts): cdiv(num_rows * parts, 64 * groups) for groups, parts in forms}
    busy = [form for form in forms if programs[form] >= BUSY * num_multiprocessors]
    groups, parts = busy[0] if busy else forms[-1]
    together = 2 if programs[groups, parts] > num_multiprocessors and groups == 1 else 1
    for products in (2, 1):
        if products > 1 and (tokens > MOST_OF_THREE or k % (COLUMNS * parts * products)):
            continue
        tiles = HopperTiles(groups, tokens, 1, 128 if together == 2 else 0, parts, products)
        stages = stages_of(tiles, silu_mul, k, SHARED_MEMORY // together)
        if stages >= 3 or products == 1:
            break
    return replace(tiles, stages=stages)


def stages_of(tiles: HopperTiles, silu_mul: bool, k: int, memory: int) -> int:
    """Return how many stages of the ring buffer fit `memory` bytes of shared memory, at most one per step along k."""
    steps = cdiv(k, COLUMNS * tiles.parts * tiles.products)
    return max(1, min((memory - tiles.ending_bytes(silu_mul)) // tiles.stage_bytes, steps))


# Tiles for more tokens than TOKEN_BUCKETS has. Sums are added every 128 columns; with 128 rows of the weight per group
# of warps they would not fit into registers.
PRODUCT_TILES = ProductTiles(2, 64, (128,), 6)
