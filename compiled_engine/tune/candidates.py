"""List the tile sizes ("tiles") to measure for each kernel: all that may be fastest, or the few that are likely to be.

The few are most similar to the tiles that were fastest for similar shapes, on this or another measured card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from math import log2
from typing import Any, Generic

import torch

from compiled_engine.passes.framework.profile import DeviceProfile
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, choose_tiles
from compiled_engine.tune.hopper_tuning import hopper_candidates
from compiled_engine.tune.linear_tuning import candidates as small_candidates
from compiled_engine.tune.linears import AnyTiles, LinearCase
from compiled_engine.tune.product_tuning import product_candidates

# Most candidates of a case in a quick search, besides the tiles that run untuned.
FEW = 6


@dataclass(frozen=True)
class Candidates:
    """Functions that list the tile sizes to measure for a linear, one function for each kind of kernel."""

    small: Callable[[LinearCase], list[Tiles]]
    hopper: Callable[[LinearCase], list[HopperTiles]]
    products: Callable[[LinearCase], list[ProductTiles]]


def all_candidates(num_sms: int) -> Candidates:
    """Return functions that list all tiles that may be fastest. num_sms: number of the GPU's multiprocessors."""
    return Candidates(small_candidates, hopper_candidates, lambda case: product_candidates(case, num_sms))


def few_candidates(profiles: Sequence[DeviceProfile], num_sms: int) -> Candidates:
    """Return functions that list, for a quick search, at most FEW of the tiles that all_candidates lists.

    profiles: measurements whose fastest tiles show which tiles are likely to be fast. For the small-batch kernels, the
    tiles that run without a profile are added, so no result is slower than those tiles.
    """
    every = all_candidates(num_sms)

    def small(case: LinearCase) -> list[Tiles]:
        untuned = choose_tiles(case.num_tokens, case.num_rows, case.k, case.silu_mul, torch.bfloat16)
        return list(dict.fromkeys((untuned, *likely(case, every.small(case), _small_tiles(profiles, case)))))

    return Candidates(
        small,
        lambda case: likely(case, every.hopper(case), _hopper_tiles(profiles, case)),
        lambda case: likely(case, every.products(case), _product_tiles(profiles, case)),
    )


@dataclass(frozen=True)
class Fastest(Generic[AnyTiles]):
    """The fastest tiles of a kernel for a measured weight [num_rows, k]."""

    num_rows: int
    k: int
    tiles: AnyTiles


def likely(case: LinearCase, tiles: Sequence[AnyTiles], measured: Iterator[Fastest[AnyTiles]]) -> list[AnyTiles]:
    """Return at most FEW of `tiles`: those nearest to tiles that were measured as fastest, the nearest first.

    measured: the fastest tiles of measured weights. The distance to such tiles is the number of fields that differ,
    plus the difference of the weights' shapes: |log2| of the ratio of rows, plus that of the ratio of columns.
    """
    known = [(_distance(case, each), astuple(each.tiles)) for each in measured]

    def distance(candidate: AnyTiles) -> float:
        fields = astuple(candidate)
        return min((far + sum(map(_differ, fields, other)) for far, other in known), default=0.0)

    return sorted(tiles, key=distance)[:FEW]


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other)


def _distance(case: LinearCase, measured: Fastest[AnyTiles]) -> float:
    return abs(log2(case.num_rows / measured.num_rows)) + abs(log2(case.k / measured.k))


def _small_tiles(profiles: Sequence[DeviceProfile], case: LinearCase) -> Iterator[Fastest[Tiles]]:
    for (tokens, rows, k, gated), tiles in (item for profile in profiles for item in profile.tiles.items()):
        if (tokens, gated) == (case.num_tokens, case.silu_mul):
            fields: dict[str, Any] = tiles  # type: ignore[assignment]
            yield Fastest(rows, k, Tiles(**fields))


def _hopper_tiles(profiles: Sequence[DeviceProfile], case: LinearCase) -> Iterator[Fastest[HopperTiles]]:
    for (tokens, rows, k, gated), tiles in (item for profile in profiles for item in profile.hopper_tiles.items()):
        if (tokens, gated) == (case.num_tokens, case.silu_mul):
            yield Fastest(rows, k, HopperTiles(**tiles))


def _product_tiles(profiles: Sequence[DeviceProfile], case: LinearCase) -> Iterator[Fastest[ProductTiles]]:
    for product in (product for profile in profiles for product in profile.products):
        if product.first <= case.num_tokens <= product.last and product.gated == case.silu_mul:
            tiles = ProductTiles(**product.tiles | {"parts": tuple(product.tiles["parts"])})
            yield Fastest(product.num_rows, product.k, tiles)
