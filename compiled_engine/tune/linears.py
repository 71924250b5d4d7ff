"""Linears as cases to tune, and chains of them to run and to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from compiled_engine.passes.framework.profile import LinearKey
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.passes.linear.small_batch_linear_op import Tiles

SHARED_MEMORY = 220 << 10
REPEATS = 9
# Bytes of weights used in turn, more than the L2 cache holds.
WORKING_SET = 800 << 20
# Names of cases: the linear that computes logits, and any other.
HEAD, LAYER = "head", "layer"


@dataclass(frozen=True)
class LinearCase:
    """A [num_tokens, k] x [num_rows, k] product of a model; with silu_mul num_rows counts gate and up together. name:
    HEAD or LAYER."""

    name: str
    num_tokens: int
    num_rows: int
    k: int
    norm: bool
    silu_mul: bool
    residual: bool


def at_each(cases: Iterable[LinearCase], token_counts: Iterable[int]) -> list[LinearCase]:
    """The cases with each of these numbers of tokens."""
    cases = tuple(cases)
    return [replace(case, num_tokens=tokens) for tokens in token_counts for case in cases]


Linear = Callable[..., torch.Tensor]
AnyTiles = TypeVar("AnyTiles", Tiles, HopperTiles, ProductTiles)


def key(case: LinearCase) -> LinearKey:
    """The place of a case in a profile."""
    return case.num_tokens, case.num_rows, case.k, case.silu_mul


class Smallest(NamedTuple):
    """The fewest tokens for which tiles were measured, in microseconds of a launch, next to the library."""

    num_tokens: int
    microseconds: float
    cublas_microseconds: float


@dataclass(frozen=True)
class TunedLinear:
    """The fastest tiles of a case, microseconds of a launch, and of the least that the device could take. smallest:
    None where they were measured for the case's number of tokens alone."""

    case: LinearCase
    tiles: Tiles | HopperTiles | ProductTiles
    microseconds: float
    cublas_microseconds: float
    bound_microseconds: float
    smallest: Smallest | None = None


class Chain:
    """Linears of which each reads what the one before it wrote, over as many layers as fill the working set."""

    def __init__(self, cases: Sequence[LinearCase], layers: int | None = None, device: str = "cuda"):
        size = sum(case.num_rows * case.k * 2 for case in cases)
        self.cases = cases
        self.generator = torch.Generator(device).manual_seed(0)
        self.layers = [
            [self._normal(case.num_rows, case.k) / case.k**0.5 for case in cases]
            for _ in range(layers or max(2, min(64, -(-WORKING_SET // size))))
        ]
        tokens = cases[0].num_tokens
        self.inputs = {case.k: self._normal(tokens, case.k) for case in cases}
        self.residuals = [self._normal(tokens, case.num_rows) if case.residual else None for case in cases]
        self.norm_weights = [1 + self._normal(case.k) / 8 if case.norm else None for case in cases]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.bfloat16, device=self.generator.device)

    def run(self, linears: Sequence[Linear], layers: int | None = None) -> torch.Tensor:
        x_TK = self.inputs[self.cases[0].k]
        for weights in self.layers[:layers]:
            for i, case in enumerate(self.cases):
                # Only q of the qkv projection is passed on. What is too narrow for the next linear is not: a linear
                # may be measured alone, or follow one that it does not follow in the model.
                x_TK = linears[i](
                    (x_TK if x_TK.shape[1] >= case.k else self.inputs[case.k])[:, : case.k],
                    weights[i],
                    None,
                    self.norm_weights[i],
                    1e-6,
                    self.residuals[i],
                    case.silu_mul,
                )
        return x_TK

    def microseconds(self, linears: Sequence[Linear], repeats: int, sustained_ms: float = 0.0) -> float:
        """Time a layer, without a pause between repeats: the median of the last ones, behind others that take
        sustained_ms."""
        self.run(linears, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(linears)
        (first_ms,) = _replays_ms(graph, 1)
        replays_ms = _replays_ms(graph, repeats + int(sustained_ms / first_ms))
        graph.reset()
        return sorted(replays_ms[-repeats:])[repeats // 2] * 1e3 / len(self.layers)


def _replays_ms(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds of each of `count` replays behind a first one, which the host launches ahead of the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def right(
    chain: Chain, candidates: Iterable[AnyTiles], kernel: Callable[[AnyTiles], Linear], expected: torch.Tensor
) -> Iterator[AnyTiles]:
    """The candidates that this device can hold, and that compute what is expected of the chain's first layer."""
    for tiles in candidates:
        try:
            found = chain.run([kernel(tiles)], 1).float()
        except Exception:  # out of shared memory, of registers
            continue
        if bool((found - expected).abs().max() <= 0.03 * expected.abs().max()):
            yield tiles
