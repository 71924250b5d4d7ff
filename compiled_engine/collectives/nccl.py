"""Collectives between GPUs through NCCL: where they cannot write each other's memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from compiled_engine.collectives.gloo import least, leave
from compiled_engine.collectives.push import PushBuffer
from compiled_engine.collectives.rows import padded, rows_a_rank, rows_of


class NcclGroup:
    """See Group."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device):
        """NCCL itself connects at its first collective."""
        self.kind, self.rank, self.size, self.members = "NCCL", members.rank(), members.size(), members
        self.pushed: PushBuffer | None = None
        self.device = device

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.members)
        return total

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = x_TV.shape
        parts_RTV = x_TV.new_empty((self.size, num_rows, num_columns))
        dist.all_gather_into_tensor(parts_RTV, x_TV.contiguous(), self.members)
        return parts_RTV.transpose(0, 1).reshape(num_rows, self.size * num_columns)

    def rows(self, num_rows: int) -> slice:
        return rows_of(self.rank, self.size, num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        num_rows, hidden_size = x_TD.shape
        share = rows_a_rank(self.size, num_rows)
        own_SD = x_TD.new_empty((share, hidden_size))
        dist.reduce_scatter_tensor(own_SD, padded(x_TD, self.size * share), group=self.members)
        rows = self.rows(num_rows)
        return own_SD[: rows.stop - rows.start]

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        share = rows_a_rank(self.size, num_rows)
        out_TD = own_SD.new_empty((self.size * share, own_SD.shape[1]))
        dist.all_gather_into_tensor(out_TD, padded(own_SD, share), self.members)
        return out_TD[:num_rows]

    def least(self, value: int) -> int:
        return least(value)

    def close(self) -> None:
        leave()
