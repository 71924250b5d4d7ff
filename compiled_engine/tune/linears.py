"""Linears to be tuned, and chains of linears that can be run and timed."""

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
# Bytes of weights used in turn, to exceed the L2 cache.
WORKING_SET = 800 << 20
# Names of cases: the linear that computes logits, and all others.
HEAD, LAYER = "head", "layer"


@dataclass(frozen=True)
class LinearCase:
    """A model's linear, inputs [num_tokens, k] times weight [num_rows, k] transposed, and the ops fused with it."""

    name: str  # HEAD or LAYER
    num_tokens: int
    num_rows: int
    k: int
    norm: bool
    silu_mul: bool  # num_rows counts gate and up together
    residual: bool


def at_each(cases: Iterable[LinearCase], token_counts: Iterable[int]) -> list[LinearCase]:
    """Return a copy of each case for each of these numbers of tokens."""
    cases = tuple(cases)
    return [replace(case, num_tokens=tokens) for tokens in token_counts for case in cases]


Linear = Callable[..., torch.Tensor]
AnyTiles = TypeVar("AnyTiles", Tiles, HopperTiles, ProductTiles)


def key(case: LinearCase) -> LinearKey:
    """Return the key of a case's tiles in a profile: tokens, rows, columns, whether the rows are of gate and up."""
    return case.num_tokens, case.num_rows, case.k, case.silu_mul


class Smallest(NamedTuple):
    """The smallest number of tokens with which tiles were measured, and the times per launch with that number."""

    num_tokens: int
    microseconds: float
    cublas_microseconds: float


@dataclass(frozen=True)
class TunedLinear:
    """The fastest tiles of a linear, with times per launch."""

    case: LinearCase
    tiles: Tiles | HopperTiles | ProductTiles
    microseconds: float
    cublas_microseconds: float
    bound_microseconds: float  # least time that the device allows
    smallest: Smallest | None = None  # None if measured at the case's number of tokens only


class Outcome(NamedTuple):
    """A measured case, with its fastest tiles; None if another kernel is faster or no tiles are correct."""

    case: LinearCase
    tuned: TunedLinear | None


class Chain:
    """Linears that each read the previous linear's result, repeated over layers with different random weights.

    A linear for which the previous result is too narrow reads random inputs. layers: number of layers; by default 2 to
    64, as many as make the weights fill WORKING_SET bytes, so that they are not read from the L2 cache.
    """

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
                # Of the qkv projection only q is passed on. A result too narrow for the next linear is replaced: a
                # linear may be measured alone, or after one that does not precede it in the model.
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
        """Return the microseconds of one layer: the median of `repeats` runs as a CUDA graph.

        linears: the kernel for each case. sustained_ms: milliseconds of untimed runs that precede the timed runs
        without a pause.
        """
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
    """Return the milliseconds of each of `count` replays, after an untimed replay. The host waits only for the last."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def right(
    chain: Chain, candidates: Iterable[AnyTiles], kernel: Callable[[AnyTiles], Linear], expected: torch.Tensor
) -> Iterator[AnyTiles]:
    """Yield the candidates that fit this device and whose result for the chain's first layer is close to `expected`.

    kernel: returns the kernel with a candidate's tiles.
    """
    for tiles in candidates:
        try:
            found = chain.run([kernel(tiles)], 1).float()
        except Exception:  # such as out of shared memory or registers
            continue
        if bool((found - expected).abs().max() <= 0.03 * expected.abs().max()):
            yield tiles
