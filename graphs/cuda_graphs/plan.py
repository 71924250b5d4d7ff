"""Capture sizes planned from a histogram of batch sizes: the least padding that a budget of graphs allows.

Dynamic programming: with the largest size fixed, the best k sizes up to it end in some size below, before which the
best k - 1 sizes stand. Only sizes that occurred can be best: a graph between two of them pads more than the lower of
the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GraphFamily:
    """Graphs that serve the same batches. `histogram`: size of a batch -> how often it occurred; `seconds` and
    `bytes`: what one more graph costs, beside the memory that all graphs share."""

    histogram: Mapping[int, int]
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class CaptureBudget:
    """What all graphs together may take; None is no limit."""

    graphs: float | None = None
    seconds: float | None = None
    bytes: float | None = None

    def allows(self, families: Sequence[GraphFamily], counts: Sequence[int]) -> bool:
        """Whether so many graphs of each family fit."""
        pairs = list(zip(families, counts, strict=True))
        needs = (
            (self.graphs, sum(counts)),
            (self.seconds, sum(family.seconds * count for family, count in pairs)),
            (self.bytes, sum(family.bytes * count for family, count in pairs)),
        )
        return all(limit is None or need <= limit for limit, need in needs)


def plan_capture_sizes(families: Sequence[GraphFamily], budget: CaptureBudget) -> list[tuple[int, ...]]:
    """For each family its sizes, ascending: those with the fewest padding tokens over the histograms.

    Each family that occurred at all gets its largest size, so that every batch has a graph; of equally good plans the
    one with fewer graphs is taken. Raises ValueError where the budget does not allow that.
    """
    most = max((len(family.histogram) for family in families), default=0)
    limit = most if budget.graphs is None else int(min(most, budget.graphs))
    plans = [best_sizes(family.histogram, limit) for family in families]
    choices = [
        combination
        for combination in itertools.product(*plans)
        if budget.allows(families, [len(sizes) for _, sizes in combination])
    ]
    if not choices:
        raise ValueError(f"the budget {budget} does not allow one graph for each kind of batch; allow more")
    best = min(choices, key=lambda choice: (sum(padding for padding, _ in choice), sum(len(s) for _, s in choice)))
    return [sizes for _, sizes in best]


def best_sizes(histogram: Mapping[int, int], limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """For 1, 2, ... up to `limit` graphs: (padding tokens, sizes). For an empty histogram: no padding, no size."""
    sizes = sorted(size for size, count in histogram.items() if count > 0)
    if not sizes:
        return [(0, ())]
    ends = np.array([0, *sizes], dtype=np.int64)
    batches = np.cumsum([0, *(histogram[size] for size in sizes)])
    tokens = np.cumsum([0, *(histogram[size] * size for size in sizes)])
    # padding[i, j]: of all batches above ends[i] up to ends[j], padded to ends[j].
    padding = ends[None, :] * (batches[None, :] - batches[:, None]) - (tokens[None, :] - tokens[:, None])
    impossible = np.iinfo(np.int64).max // 4
    padding = np.where(ends[:, None] < ends[None, :], padding, impossible)
    least = np.where(ends == 0, 0, impossible)
    before: list[np.ndarray] = []
    found = []
    for _ in range(min(limit, len(sizes))):
        totals = least[:, None] + padding
        before.append(totals.argmin(0))
        least = np.minimum(totals.min(0), impossible)
        found.append((int(least[-1]), _backtrack(before, ends)))
    return found


def _backtrack(before: Sequence[np.ndarray], ends: np.ndarray) -> tuple[int, ...]:
    chosen = []
    at = len(ends) - 1
    for step in reversed(before):
        chosen.append(int(ends[at]))
        at = int(step[at])
    return tuple(reversed(chosen))
