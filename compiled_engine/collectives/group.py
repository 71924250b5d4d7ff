"""The ranks that compute each layer together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from compiled_engine.collectives.push import PushBuffer


class Group(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same shapes.

    The collectives on a GPU may be called inside a CUDA graph's capture. kind: what carries them. pushed: for kernels
    that have a sum over the ranks in them; None where there are none.
    """

    kind: str
    rank: int
    size: int
    pushed: PushBuffer | None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in a tensor of its own."""
        ...

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        """The ranks' [T, V] side by side in the order of the ranks: [T, size * V]."""
        ...

    def rows(self, num_rows: int) -> slice:
        """Those of a batch's rows that are this rank's, where ranks share what is computed of whole rows."""
        ...

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over all ranks."""
        ...

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The rows of all ranks, [num_rows, D]; own_SD: this rank's."""
        ...

    def least(self, value: int) -> int:
        """The smallest of the numbers of all ranks, those of other stages included, on the host; every rank waits until
        all have called it."""
        ...

    def close(self) -> None: ...


class StandIn:
    """Takes the place of a group where only one rank runs: the results have the right shapes, not the values. All rows
    are its own.

    least: of all ranks, where those of other stages do run.
    """

    def __init__(
        self, size: int = 1, rank: int = 0, pushed: PushBuffer | None = None, least: Callable[[int], int] | None = None
    ):
        self.kind, self.rank, self.size, self.pushed = "none", rank, size, pushed
        self._least = least

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        return x_TV.repeat(1, self.size)

    def rows(self, num_rows: int) -> slice:
        return slice(0, num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x_TD)

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        return own_SD

    def least(self, value: int) -> int:
        return value if self._least is None else self._least(value)

    def close(self) -> None:
        pass


def stand_in_for(group: Group) -> StandIn:
    """What one rank of `group` runs with while the others do not."""
    return StandIn(group.size, pushed=group.pushed.alone() if group.pushed else None)


# The ops of a compiled graph find their ranks here: which they are may not be part of the graph.
_GROUP: ContextVar[Group] = ContextVar("group")


def current_group() -> Group:
    """The group that this thread's collectives go to. Raises RuntimeError where there is none."""
    try:
        return _GROUP.get()
    except LookupError:
        raise RuntimeError("a collective was called outside of a group of ranks") from None


@contextmanager
def in_group(group: Group) -> Iterator[None]:
    """The collectives that this thread calls inside go to `group`."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)
