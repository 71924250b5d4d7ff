"""Ranks that are threads of one process: what each hands out, all get."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from compiled_engine.parallel.gloo import rows_of
from compiled_engine.parallel.group import PushBuffer, add_in_order

T = TypeVar("T")


class ThreadGroup:
    """Group whose ranks are threads. exchanged: how many numbers per row each collective moved."""

    kind = "threads"

    def __init__(self, rank: int, parts: list[torch.Tensor | None], barrier: Barrier):
        self.rank, self.size = rank, len(parts)
        self.pushed: PushBuffer | None = None
        self.exchanged: list[int] = []
        self._parts, self._barrier = parts, barrier

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = own.clone()
        self._barrier.wait(60)
        found = [part for part in self._parts if part is not None]
        self._barrier.wait(60)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        return add_in_order(self._all(x_TD), x_TD.dtype)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        self.exchanged.append(x_TV.shape[1])
        return torch.cat(self._all(x_TV), -1)

    def rows(self, num_rows: int) -> slice:
        return rows_of(self.rank, self.size, num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x_TD)[self.rows(x_TD.shape[0])]

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        return torch.cat(self._all(own_SD))

    def all_reduce_min(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value))).min())

    def close(self) -> None:
        pass


def on_ranks(num_ranks: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on each rank, in threads, and return the results."""
    parts: list[torch.Tensor | None] = [None] * num_ranks
    barrier = Barrier(num_ranks)
    groups = [ThreadGroup(rank, parts, barrier) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(work, groups))
