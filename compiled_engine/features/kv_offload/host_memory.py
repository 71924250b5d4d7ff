"""Host memory for blocks, pinned if a GPU copies from and to it."""

from __future__ import annotations

import mmap

import torch


class HostMemory:
    """Rows of blocks, uint8 [num_slots, row_bytes]. The system provides its pages when they are pinned, or first used.

    It is not from PyTorch's allocator, which would round its size up to a power of two.
    """

    def __init__(self, num_slots: int, row_bytes: int, *, pinned: bool) -> None:
        memory = mmap.mmap(-1, num_slots * row_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, row_bytes)
        self._pinned = pinned
        if pinned:
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, 0)))

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def close(self) -> None:
        """Unpin the memory. No copy may be running."""
        if self._pinned:
            self._pinned = False
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.rows.data_ptr())))
