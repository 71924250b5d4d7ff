"""The ranks that compute each layer together, as one of them sees them, and memory into which their kernels push rows.

A push buffer has a row for each rank and slot, twice, and flags. A slot is a row of a batch. A kernel writes its rank's
row into every rank's buffer, then raises its flag there to the slot's epoch; it waits for the flags of all ranks in its
own buffer, and reads their rows from there. Epochs are counted on the device, so a replayed CUDA graph goes on
counting. Odd and even ones use different rows: a rank that raises its flag to one epoch has read the rows of the epoch
before, so its peers may write the epoch after.

The first slots have rows of twice the size besides, for words that hold the epoch themselves: see push_kernels.py.
Those exchanges raise no flags, so they count epochs of their own. A flag thus stays close to the epoch that is waited
for, and the sign of the difference says whether it was raised although epochs wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

FLAG_BYTES = 4
# Alignment of the data in bytes.
_ALIGNMENT = 1024
ROW_ALIGNMENT = 16
# Rows of a batch that all ranks together write: more are summed faster in two steps. Two ranks send as much either way.
ROWS_OF_ALL_RANKS = 512
MOST_BYTES = 512 << 20
# Slots with rows of tagged words: with more rows twice the bytes take longer than a flag.
TAGGED_SLOTS = 64
# The ops of a compiled graph find their ranks here: which they are may not be part of the graph.
_GROUP: ContextVar[Group] = ContextVar("group")


@dataclass(frozen=True)
class PushBuffer:
    """own: this rank's memory, [bytes]. addresses: of every rank's, int64 on the device. epochs: int32 [num_slots], of
    exchanges with flags. tagged_epochs: int32 [num_tagged_slots], of those with tagged words."""

    own: torch.Tensor
    addresses: torch.Tensor
    epochs: torch.Tensor
    tagged_epochs: torch.Tensor
    rank: int
    num_ranks: int
    row_bytes: int

    @property
    def num_slots(self) -> int:
        return self.epochs.shape[0]

    @property
    def data_offset(self) -> int:
        """Bytes from the flags, int32 [slot, source rank], to the rows, [epoch % 2, slot, source rank, row]."""
        return data_offset(self.num_slots, self.num_ranks)

    def takes(self, x_TD: torch.Tensor) -> bool:
        """Return whether the rows fit, and are aligned as the kernels need."""
        is_row = x_TD.shape[1] * x_TD.element_size() == self.row_bytes
        return is_row and x_TD.shape[0] <= self.num_slots and self.row_bytes % ROW_ALIGNMENT == 0

    @property
    def num_tagged_slots(self) -> int:
        return self.tagged_epochs.shape[0]

    @property
    def tagged_offset(self) -> int:
        """Bytes from the flags to the rows of tagged words, [epoch % 2, slot, source rank, 2 * row]."""
        return tagged_offset(self.num_slots, self.num_ranks, self.row_bytes)

    def tags(self, x_TD: torch.Tensor) -> bool:
        """Return whether the rows are few enough to be tagged, and in bfloat16, of which a word holds two."""
        return x_TD.dtype == torch.bfloat16 and x_TD.shape[0] <= self.num_tagged_slots

    def alone(self) -> PushBuffer:
        """Return a buffer like it for a single rank: the same kernels run on it and wait for no peer."""
        own = torch.zeros(buffer_bytes(self.num_slots, 1, self.row_bytes), dtype=torch.uint8, device=self.own.device)
        addresses = torch.tensor([own.data_ptr()], dtype=torch.int64, device=own.device)
        epochs, tagged_epochs = torch.zeros_like(self.epochs), torch.zeros_like(self.tagged_epochs)
        return PushBuffer(own, addresses, epochs, tagged_epochs, 0, 1, self.row_bytes)


def num_slots_for(num_ranks: int, row_bytes: int, most_rows: int) -> int:
    """Rows of a batch that are worth having slots; most_rows: of any batch."""
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
        """Return this rank's rows of a batch, where ranks share what is computed of whole rows."""
        ...

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over all ranks."""
        ...

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The rows of all ranks, [num_rows, D]; own_SD: this rank's."""
        ...

    def all_reduce_min(self, value: int) -> int:
        """The smallest of the numbers of all ranks, those of other stages included, on the host; every rank waits until
        all have called it."""
        ...

    def close(self) -> None: ...


class FakeGroup:
    """Takes the place of a group where only one rank runs: the results have the right shapes, not the values. All rows
    are its own.

    all_reduce_min: over all ranks, where those of other stages do run.
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
    """Return the group with which one rank of `group` runs while the others do not."""
    return FakeGroup(group.size, pushed=group.pushed.alone() if group.pushed else None)


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
