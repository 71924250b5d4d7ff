"""Quantised linears on Hopper's own kernels: what these take, and their tiles by a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from compiled_engine.kernels.launch_arguments import cdiv
from compiled_engine.passes.linear.hopper_linear import MOST_COLUMNS, TOKEN_BUCKETS, HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.quantisation import LinearScheme

# Columns of a product of 8-bit codes on the tensor cores, and so of the tiles that may share a scale.
COLUMNS = 128
# Shared memory of a program, in bytes, without barriers.
SHARED_MEMORY = 226 << 10
# The share of multiprocessors that a launch should have programs for.
BUSY = 0.9
# Most columns of the tensor cores' products where three groups of warps have registers for them.
MOST_OF_THREE = 64


def why_not_on_hopper(num_rows: int, k: int, silu_mul: bool, scheme: LinearScheme, dtype: torch.dtype) -> str | None:
    """Why Hopper's kernels do not take a linear; None where they do."""
    if scheme.inputs is None:
        return "its inputs are not rounded"
    input_columns = 0 if scheme.inputs.static else scheme.inputs.columns
    if not {scheme.weight.columns, input_columns} <= {0, COLUMNS}:
        return f"its scales are not of {COLUMNS} columns or whole rows ({scheme})"
    even = 16 if silu_mul else 8
    if k % 16 or num_rows % even:
        return f"its sizes [{num_rows}, {k}] are no multiples of {even} and 16"
    return None if dtype.itemsize == 2 else f"its results are {str(dtype).removeprefix('torch.')}"


@cache
def quantised_tiles(num_tokens: int, num_rows: int, k: int, silu_mul: bool, num_multiprocessors: int) -> HopperTiles:
    """Tiles for a [num_tokens, k] x [num_rows, k] product of codes: the largest of which every multiprocessor has one,
    with as many stages as fit."""
    tokens = max(8, next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket))
    # Two programs on a multiprocessor have registers for half as many columns.
    most = MOST_COLUMNS if cdiv(num_rows, 32) <= num_multiprocessors else MOST_COLUMNS // 2
    two_parts = 2 * tokens <= most and k % (2 * COLUMNS) == 0
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
    """Stages of such tiles that fit this many bytes of shared memory, at most as many as there are steps."""
    steps = cdiv(k, COLUMNS * tiles.parts * tiles.products)
    return max(1, min((memory - tiles.ending_bytes(silu_mul)) // tiles.stage_bytes, steps))


# Tiles for more tokens than those of TOKEN_BUCKETS. With 128 rows of the weight for each group of warps, the sums that
# are added every 128 columns do not fit into registers.
PRODUCT_TILES = ProductTiles(2, 64, (128,), 6)
