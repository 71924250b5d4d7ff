"""The linears of a model as cases to tune, and chains of them to run and to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from compiled_engine.config import ModelConfig, local_share
from compiled_engine.passes.framework.profile import LinearKey
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.passes.linear.small_batch_linear_op import Tiles

SHARED_MEMORY = 220 << 10
REPEATS = 9
# Bytes of weights used in turn, more than the L2 cache holds.
WORKING_SET = 800 << 20


@dataclass(frozen=True)
class LinearCase:
    """A [num_tokens, k] x [num_rows, k] product of a model; with silu_mul num_rows counts gate and up together."""

    name: str
    num_tokens: int
    num_rows: int
    k: int
    norm: bool
    silu_mul: bool
    residual: bool


def cases_of(model: ModelConfig, num_tokens: int, num_ranks: int = 1) -> list[LinearCase]:
    """Return the five linears of a decoder-only model after the passes: with several ranks those of one rank, whose
    norms and residual adds are part of the sums between them."""
    model, alone = local_share(model, num_ranks), num_ranks == 1
    heads, width = model.num_heads + 2 * model.num_kv_heads, model.intermediate_size
    hidden = model.hidden_size
    return [
        LinearCase("qkv", num_tokens, heads * model.head_dim, hidden, alone, False, False),
        LinearCase("o", num_tokens, hidden, model.num_heads * model.head_dim, False, False, alone),
        LinearCase("gate_up", num_tokens, 2 * width, hidden, alone, True, False),
        LinearCase("down", num_tokens, hidden, width, False, False, alone),
        LinearCase("head", num_tokens, model.vocab_size, hidden, alone, False, False),
    ]


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

    def __init__(self, cases: Sequence[LinearCase], layers: int | None = None):
        size = sum(case.num_rows * case.k * 2 for case in cases)
        self.cases = cases
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.layers = [
            [self._normal(case.num_rows, case.k) / case.k**0.5 for case in cases]
            for _ in range(layers or max(2, min(64, -(-WORKING_SET // size))))
        ]
        tokens = cases[0].num_tokens
        self.x_TK = self._normal(tokens, cases[0].k)
        self.residuals = [self._normal(tokens, case.num_rows) if case.residual else None for case in cases]
        self.norm_weights = [1 + self._normal(case.k) / 8 if case.norm else None for case in cases]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.bfloat16, device="cuda")

    def run(self, linears: Sequence[Linear], layers: int | None = None) -> torch.Tensor:
        x_TK = self.x_TK
        for weights in self.layers[:layers]:
            for i, case in enumerate(self.cases):
                # Only q of the qkv projection is passed on; a linear measured alone may be too narrow for the next
                # layer.
                x_TK = linears[i](
                    (x_TK if x_TK.shape[1] >= case.k else self.x_TK)[:, : case.k],
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
