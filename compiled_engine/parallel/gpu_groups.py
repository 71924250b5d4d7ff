"""Collectives between GPUs: through symmetric memory if they can write each other's memory, otherwise through NCCL.

PyTorch's symmetric memory also works in CUDA graphs. Small all-reduces are one-shot: every rank reads all ranks'
tensors and sums them, in one exchange. Large all-reduces are two-shot: each rank sums one part and then fetches the
parts of the other ranks, which moves fewer bytes. Neither kind uses NVLink's multicast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from compiled_engine.parallel.gloo import all_reduce_min, leave, padded, rows_a_rank, rows_of
from compiled_engine.parallel.group import PushBuffer, add_in_order, buffer_bytes, num_slots_for, num_tagged_slots

# Largest one-shot all-reduce in bytes, by number of ranks; above, two-shot is faster.
ONE_SHOT_BYTES = {2: 512 << 10, 4: 128 << 10, 8: 64 << 10}
# Larger tensors pass through the workspace in parts.
MOST_WORKSPACE_BYTES = 256 << 20
# Dtypes that PyTorch's kernels sum.
SUMMED_DTYPES = (torch.bfloat16, torch.float32)
_BARRIERS = 0, 1  # channels of the barriers before and after peers' memory is read


class NcclGroup:
    """Group whose collectives run over NCCL."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device):
        """Create the group. NCCL itself connects later, at the first collective."""
        self.kind, self.rank, self.size, self.members = "NCCL", members.rank(), members.size(), members
        self.pushed: PushBuffer | None = None
        self.device = device

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.members)
        return total

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        return add_in_order(self._gathered(x_TD).unbind(), x_TD.dtype)

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = x_TV.shape
        return self._gathered(x_TV).transpose(0, 1).reshape(num_rows, self.size * num_columns)

    def _gathered(self, x_TV: torch.Tensor) -> torch.Tensor:
        parts_RTV = x_TV.new_empty((self.size, *x_TV.shape))
        dist.all_gather_into_tensor(parts_RTV, x_TV.contiguous(), self.members)
        return parts_RTV

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

    def all_reduce_min(self, value: int) -> int:
        return all_reduce_min(value)

    def close(self) -> None:
        leave()


class SymmetricMemoryGroup:
    """Group whose collectives run over symmetric memory.

    over: NCCL group of the same ranks. It runs all_reduce_min, and reduce_scatter and gather_rows of tensors that are
        larger than the workspace.
    workspace_bytes: size of the largest tensor in a collective, capped at MOST_WORKSPACE_BYTES.
    row_bytes, most_rows: bytes of a row and most rows of a batch. They determine the size of the push buffer, through
        which kernels exchange rows (group.py).
    """

    def __init__(self, over: NcclGroup, workspace_bytes: int, row_bytes: int, most_rows: int):
        """Allocate this rank's memory, wait for the other ranks, and map their memory.

        Raises RuntimeError if GPUs cannot access each other's memory.
        """
        self.kind, self.rank, self.size, self._over = "symmetric memory", over.rank, over.size, over
        device = over.device
        self._name = over.members.group_name
        self._workspace = symm_mem.empty(
            min(workspace_bytes, MOST_WORKSPACE_BYTES), dtype=torch.uint8, device=device
        ).zero_()
        self._handle = symm_mem.rendezvous(self._workspace, self._name)
        if self._handle.buffer_ptrs[self.rank] != self._workspace.data_ptr():
            raise RuntimeError("symmetric memory does not begin where its tensor does")
        num_slots = num_slots_for(self.size, row_bytes, most_rows)
        self._pushed_memory = symm_mem.empty(
            buffer_bytes(num_slots, self.size, row_bytes), dtype=torch.uint8, device=device
        ).zero_()
        self._pushed_handle = symm_mem.rendezvous(self._pushed_memory, self._name)
        self.pushed: PushBuffer | None = PushBuffer(
            own=self._pushed_memory,
            addresses=torch.tensor(self._pushed_handle.buffer_ptrs, dtype=torch.int64, device=device),
            epochs=torch.zeros(num_slots, dtype=torch.int32, device=device),
            tagged_epochs=torch.zeros(num_tagged_slots(num_slots), dtype=torch.int32, device=device),
            rank=self.rank,
            num_ranks=self.size,
            row_bytes=row_bytes,
        )
        torch.cuda.synchronize(device)
        self.all_reduce_min(1)  # a barrier: all flags are zeroed before any rank raises one
        self._one_shot_bytes = next((most for ranks, most in ONE_SHOT_BYTES.items() if self.size <= ranks), 0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.dim() > 2:  # rows may be divided, and the batch of eager code is one
            return self.all_reduce(x.flatten(0, -2)).view(x.shape)
        num_rows = max(1, self._workspace.nbytes // max(1, x[0].nbytes)) if x.shape[0] else 1
        if x.shape[0] > num_rows:
            return torch.cat([self.all_reduce(part) for part in x.split(num_rows)])
        buffer = self._workspace[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes <= self._one_shot_bytes:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._name)
        out = torch.empty_like(x)
        buffer.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out)
        return out

    def all_reduce_in_order(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        at_once = max(1, self._workspace.nbytes // (x_TD.shape[1] * x_TD.element_size()))
        for start in range(0, len(x_TD), at_once):
            rows = slice(start, start + at_once)
            shape, dtype = tuple(x_TD[rows].shape), x_TD.dtype
            self._handle.get_buffer(self.rank, shape, dtype).copy_(x_TD[rows])
            self._handle.barrier(_BARRIERS[0])
            parts = (self._handle.get_buffer(rank, shape, dtype) for rank in range(self.size))
            out_TD[rows].copy_(add_in_order(parts, dtype))
            self._handle.barrier(_BARRIERS[1])
        return out_TD

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = x_TV.shape
        out_TV = x_TV.new_empty((num_rows, self.size * num_columns))
        at_once = max(1, self._workspace.nbytes // (num_columns * x_TV.element_size()))
        for start in range(0, num_rows, at_once):
            part_TV = x_TV[start : start + at_once]
            shape, dtype = tuple(part_TV.shape), x_TV.dtype
            self._handle.get_buffer(self.rank, shape, dtype).copy_(part_TV)
            self._handle.barrier(_BARRIERS[0])
            for rank in range(self.size):
                columns = slice(rank * num_columns, (rank + 1) * num_columns)
                peer_TV = self._handle.get_buffer(rank, shape, dtype)
                out_TV[start : start + at_once, columns].copy_(peer_TV)
            self._handle.barrier(_BARRIERS[1])
        return out_TV

    def rows(self, num_rows: int) -> slice:
        return self._over.rows(num_rows)

    def reduce_scatter(self, x_TD: torch.Tensor) -> torch.Tensor:
        if x_TD.nbytes > self._workspace.nbytes:
            return self._over.reduce_scatter(x_TD)
        shape, rows = tuple(x_TD.shape), self.rows(x_TD.shape[0])
        self._handle.get_buffer(self.rank, shape, x_TD.dtype).copy_(x_TD)
        self._handle.barrier(_BARRIERS[0])
        parts = [self._handle.get_buffer(rank, shape, x_TD.dtype)[rows] for rank in range(self.size)]
        own_SD = parts[0] + parts[1] if self.size == 2 else torch.stack(parts).float().sum(0).to(x_TD.dtype)
        self._handle.barrier(_BARRIERS[1])
        return own_SD

    def gather_rows(self, own_SD: torch.Tensor, num_rows: int) -> torch.Tensor:
        out_TD = own_SD.new_empty((num_rows, own_SD.shape[1]))
        if out_TD.nbytes > self._workspace.nbytes:
            return self._over.gather_rows(own_SD, num_rows)
        shape, dtype = tuple(out_TD.shape), own_SD.dtype
        self._handle.get_buffer(self.rank, shape, dtype)[self.rows(num_rows)].copy_(own_SD)
        self._handle.barrier(_BARRIERS[0])
        for rank in range(self.size):
            rows = rows_of(rank, self.size, num_rows)
            out_TD[rows].copy_(self._handle.get_buffer(rank, shape, dtype)[rows])
        self._handle.barrier(_BARRIERS[1])
        return out_TD

    def all_reduce_min(self, value: int) -> int:
        return self._over.all_reduce_min(value)

    def close(self) -> None:
        self.pushed = None
        del self._handle, self._pushed_handle, self._workspace, self._pushed_memory
        self._over.close()
