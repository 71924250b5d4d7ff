"""Collectives of the ranks that compute each layer together, and push buffers, through which kernels exchange rows.

A push buffer has, for each slot and rank, a flag and room for two rows. A slot is the index of a row in a batch. Each
exchange through a slot has the next number, the slot's epoch. A kernel writes its rank's row into every rank's buffer,
then raises its rank's flag there to the epoch. The kernel waits until the flags of all ranks in its own buffer have
reached the epoch, and reads their rows from there. Epochs are counted on the device, so a replayed CUDA graph continues
counting. Odd and even epochs use different rows: a rank that raises its flag to one epoch has read the previous epoch's
rows, so its peers may write the next epoch's.

The first slots also have rows of twice the size, for words that contain the epoch: see push_kernels.py. Exchanges
through these rows raise no flags, so their epochs are counted separately. A flag thus stays close to the awaited epoch,
and the sign of the difference shows whether it was raised, even after epochs wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

import torch

FLAG_BYTES = 4
# Alignment of the data in bytes.
_ALIGNMENT = 1024
ROW_ALIGNMENT = 16
# Most rows of a batch that all ranks together push; more are summed faster in two steps. Two ranks send the same bytes
# either way.
ROWS_OF_ALL_RANKS = 512
MOST_BYTES = 512 << 20
# Most slots with tagged rows: for more rows, sending twice the bytes takes longer than a flag.
TAGGED_SLOTS = 64
# The ops of a compiled graph look up their group here, since the graph must not depend on it.
_GROUP: ContextVar[Group] = ContextVar("group")


@dataclass(frozen=True)
class PushBuffer:
    """A rank's memory, to which the kernels of all ranks write rows, and the addresses of all ranks' memories."""

    own: torch.Tensor  # this rank's memory, [bytes]
    addresses: torch.Tensor  # of every rank's memory, int64 on the device
    epochs: torch.Tensor  # int32 [num_slots], of exchanges with flags
    tagged_epochs: torch.Tensor  # int32 [num_tagged_slots], of exchanges with tagged words
    rank: int
    num_ranks: int
    row_bytes: int

    @property
    def num_slots(self) -> int:
        return self.epochs.shape[0]

    @property
    def data_offset(self) -> int:
        """Offset in bytes at which the rows begin. Their layout is [epoch % 2, slot, source rank, row].

        The flags, int32 [slot, source rank], are at offset 0.
        """
        return data_offset(self.num_slots, self.num_ranks)

    def takes(self, x_TD: torch.Tensor) -> bool:
        """Return whether the rows of x_TD, [T, D], can be sent through this buffer.

        There must be a slot for each row, and the rows must have the size and alignment that the kernels need.
        """
        is_row = x_TD.shape[1] * x_TD.element_size() == self.row_bytes
        return is_row and x_TD.shape[0] <= self.num_slots and self.row_bytes % ROW_ALIGNMENT == 0

    @property
    def num_tagged_slots(self) -> int:
        return self.tagged_epochs.shape[0]

    @property
    def tagged_offset(self) -> int:
        """Offset in bytes at which the rows of tagged words begin.

        Their layout is [epoch % 2, slot, source rank, 2 * row]. A tagged word is an exchanged word that contains the
        epoch, so that no flag is needed.
        """
        return tagged_offset(self.num_slots, self.num_ranks, self.row_bytes)

    def tags(self, x_TD: torch.Tensor) -> bool:
        """Return whether the rows of x_TD, for which `takes` holds, can be sent as tagged words, which need no flags.

        There must be a tagged slot for each row, and elements must be bfloat16, two of which fit in a word beside the
        epoch.
        """
        return x_TD.dtype == torch.bfloat16 and x_TD.shape[0] <= self.num_tagged_slots

    def alone(self) -> PushBuffer:
        """Return a buffer with as many slots for a single rank, so that kernels run without waiting for other ranks."""
        own = torch.zeros(buffer_bytes(self.num_slots, 1, self.row_bytes), dtype=torch.uint8, device=self.own.device)
        addresses = torch.tensor([own.data_ptr()], dtype=torch.int64, device=own.device)
        epochs, tagged_epochs = torch.zeros_like(self.epochs), torch.zeros_like(self.tagged_epochs)
        return PushBuffer(own, addresses, epochs, tagged_epochs, 0, 1, self.row_bytes)


def num_slots_for(num_ranks: int, row_bytes: int, most_rows: int) -> int:
    """Return the number of slots, one per row of a batch, that a push buffer should have.

    most_rows: number of rows of the largest batch.
    """
    worth = most_rows if num_ranks == 2 else ROWS_OF_ALL_RANKS // num_ranks
    return max(1, min(worth, most_rows, MOST_BYTES // (2 * num_ranks * row_bytes)))


def num_tagged_slots(num_slots: int) -> int:
    return min(TAGGED_SLOTS, num_slots)


def data_offset(num_slots: int, num_ranks: int) -> int:
    return -(-num_slots * num_ranks * FLAG_BYTES // _ALIGNMENT) * _ALIGNMENT


def tagged_offset(num_slots: int, num_ranks: int, row_bytes: int) -> int:
    rows = 2 * num_slots * num_ranks * row_bytes
    return data_offset(num_slots, num_ranks) + -(-rows // _ALIGNMENT) * _ALIGNMENT


def buffer_bytes(num_slots: int, num_ranks: int, row_bytes: int) -> int:
    tagged = 2 * num_tagged_slots(num_slots) * num_ranks * 2 * row_bytes
    return tagged_offset(num_slots, num_ranks, row_bytes) + tagged


def add_in_order(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the ranks' tensors, added in rank order in float32 and rounded once to `dtype`."""
    return reduce(add, (part.float() for part in parts)).to(dtype)


class Group(Protocol):
    """The ranks that compute each layer together, with their collectives.

    Every rank calls the same methods in the same order, with tensors of the same shapes. Collectives on a GPU may be
    captured in a CUDA graph. kind: name of the transport. pushed: buffer through which kernels exchange rows
    themselves, without a collective; None if not available.
    """

    kind: str
    rank: int
    size: int
    pushed: PushBuffer | None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, as a new tensor."""
        ...

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, added as `add_in_order` does, so that bits do not depend on the shape."""
        ...

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        """Return the tensors [T, V] of all ranks, concatenated by columns in rank order: [T, size * V]."""
        ...

    def rows(self, num_rows: int) -> slice:
        """Return this rank's rows of a batch of num_rows rows, for work that the ranks divide by rows."""
        ...

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows (see `rows`) of the sum over all ranks."""
        ...

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the rows of all ranks, [num_rows, D]. own_SD: this rank's rows."""
        ...

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest `value` of all ranks, including those of other stages.

        Blocks until every rank has called this method.
        """
        ...

    def close(self) -> None: ...


class FakeGroup:
    """Group in which one rank runs without the others.

    Results have the right shapes, but their values are right only for size 1. `rows` gives this rank all rows.
    all_reduce_min: function that returns the smallest value of all ranks; None if no ranks of other stages run.
    """

    def __init__(
        self,
        size: int = 1,
        rank: int = 0,
        pushed: PushBuffer | None = None,
        all_reduce_min: Callable[[int], int] | None = None,
    ):
        self.kind, self.rank, self.size, self.pushed = "none", rank, size, pushed
        self._all_reduce_min = all_reduce_min

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x_TD)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        return x_TV.repeat(1, self.size)

    def rows(self, num_rows: int) -> slice:
        return slice(0, num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x_TD)

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        return own_SD

    def all_reduce_min(self, value: int) -> int:
        return value if self._all_reduce_min is None else self._all_reduce_min(value)

    def close(self) -> None:
        pass


def fake_group_for(group: Group) -> FakeGroup:
    """Return a FakeGroup of the same size, with which one rank of `group` can run while the others do not."""
    return FakeGroup(group.size, pushed=group.pushed.alone() if group.pushed else None)


def current_group() -> Group:
    """Return the group of this thread's collectives. Raises RuntimeError if there is none."""
    try:
        return _GROUP.get()
    except LookupError:
        raise RuntimeError("a collective was called outside of a group of ranks") from None


@contextmanager
def in_group(group: Group) -> Iterator[None]:
    """Within the block, make `group` the group of this thread's collectives."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)
