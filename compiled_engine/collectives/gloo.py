"""Collectives between processes on CPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from compiled_engine.collectives.push import PushBuffer

# A rank that is lost ends its processes long before; a rank may compile for as long as it takes.
TIMEOUT = timedelta(hours=1)


class GlooGroup:
    """See Group. folder: where the ranks find each other; private to them.

    bfloat16 and float16 are summed in float32 and rounded once.
    """

    def __init__(self, rank: int, size: int, folder: Path):
        """Waits for the other ranks."""
        self.kind, self.rank, self.size = "gloo", rank, size
        self.pushed: PushBuffer | None = None
        store = dist.FileStore(str(folder / "gloo"), size)
        self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.to(torch.float32, copy=True).contiguous()
        self._group.allreduce(total).wait()
        return total.to(x.dtype)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x_TV, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather(parts, x_TV.contiguous()).wait()
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        number = torch.tensor([value], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([number], options).wait()
        return int(number)

    def close(self) -> None:
        del self._group
