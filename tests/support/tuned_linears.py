"""The linears that are tuned for models whose shapes are known, and chains of linears without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from compiled_engine.tune.linears import HEAD, LAYER, LinearCase


def layer(num_rows: int, k: int, norm: bool = False, silu_mul: bool = False, residual: bool = False) -> LinearCase:
    return LinearCase(LAYER, 1, num_rows, k, norm, silu_mul, residual)


def head(num_rows: int, k: int, norm: bool) -> LinearCase:
    return LinearCase(HEAD, 1, num_rows, k, norm, False, False)


# Plain decoders, by shape and number of ranks. The norms and residual adds of a rank are part of the sums over ranks.
PLAIN = {
    ("qwen3-0.6b", 1): [
        layer(4096, 1024, norm=True),
        layer(1024, 2048, residual=True),
        layer(6144, 1024, norm=True, silu_mul=True),
        layer(1024, 3072, residual=True),
        head(151936, 1024, norm=True),
    ],
    ("qwen3-0.6b", 2): [
        layer(2048, 1024),
        layer(1024, 1024),
        layer(3072, 1024, silu_mul=True),
        layer(1024, 1536),
        head(75968, 1024, norm=False),
    ],
    ("qwen3-8b", 1): [
        layer(6144, 4096, norm=True),
        layer(4096, 4096, residual=True),
        layer(24576, 4096, norm=True, silu_mul=True),
        layer(4096, 12288, residual=True),
        head(151936, 4096, norm=True),
    ],
    ("qwen3-8b", 2): [
        layer(3072, 4096),
        layer(4096, 2048),
        layer(12288, 4096, silu_mul=True),
        layer(4096, 6144),
        head(75968, 4096, norm=False),
    ],
}


class QuickChain:
    """A chain whose linears are all correct, and each slower than the previous one."""

    times = itertools.count(1.0)

    def __init__(self, cases: Sequence[LinearCase], layers: int | None = None) -> None:
        self.cases = cases

    def run(self, linears: list[object], layers: int | None = None) -> torch.Tensor:
        return torch.ones(1)

    def microseconds(self, linears: list[object], repeats: int, sustained_ms: float = 0.0) -> float:
        return next(self.times)
