"""Collectives between processes on CPUs, and the initialisation of process groups."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from compiled_engine.parallel.group import PushBuffer, add_in_order


def rows_of(rank: int, size: int, num_rows: int) -> slice:
    """Return the contiguous range of rows that rank `rank` of `size` has, of num_rows rows.

    All ranges have rows_a_rank(size, num_rows) rows, except that those of the last ranks may be shorter or empty.
    """
    share = rows_a_rank(size, num_rows)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def rows_a_rank(size: int, num_rows: int) -> int:
    """Return the largest number of rows that a rank has, see `rows_of`."""
    return -(-num_rows // size)


def padded(x_TD: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return x_TD, contiguous, with zero rows appended until it has num_rows rows.

    Collectives need tensors of equal sizes on all ranks.
    """
    if x_TD.shape[0] == num_rows:
        return x_TD.contiguous()
    padded_TD = x_TD.new_zeros((num_rows, *x_TD.shape[1:]))
    padded_TD[: x_TD.shape[0]] = x_TD
    return padded_TD


# Long, since a rank may compile for a while; a lost rank ends the other processes much earlier.
TIMEOUT = timedelta(hours=1)


def join(backends: str, rank: int, size: int, folder: Path) -> None:
    """Make this process rank `rank` of `size`, and wait for all ranks.

    backends: see torch.distributed.init_process_group. folder: an empty folder, where the ranks find each other.
    """
    store = dist.FileStore(str(folder / "ranks"), size)
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def leave() -> None:
    """Destroy the process groups that `join` created, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_min(value: int) -> int:
    """Return the smallest `value` of all ranks, of all stages. The values are exchanged on the host, by gloo."""
    number = torch.tensor([value], dtype=torch.int64, device="cpu")
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return int(number)


class GlooGroup:
    """Group whose collectives run over gloo. bfloat16 and float16 are summed in float32 and rounded once."""

    def __init__(self, members: dist.ProcessGroup):
        self.kind, self.rank, self.size, self._members = "gloo", members.rank(), members.size(), members
        self.pushed: PushBuffer | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.to(torch.float32, copy=True).contiguous()
        dist.all_reduce(total, group=self._members)
        return total.to(x.dtype)

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        return add_in_order(self._gathered(x_TD), x_TD.dtype)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gathered(x_TV), -1)

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), self._members)
        return parts

    def rows(self, num_rows: int) -> slice:
        return rows_of(self.rank, self.size, num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x_TD)[self.rows(x_TD.shape[0])]

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        own_SD = padded(own_SD, rows_a_rank(self.size, num_rows))
        parts = [torch.empty_like(own_SD) for _ in range(self.size)]
        dist.all_gather(parts, own_SD, self._members)
        return torch.cat(parts)[:num_rows]

    def all_reduce_min(self, value: int) -> int:
        return all_reduce_min(value)

    def close(self) -> None:
        leave()
