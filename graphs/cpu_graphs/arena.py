"""Memory for what recorded calls compute: it stays, and tensors that are not needed at the same time share it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# Where tensors begin, in bytes.
ALIGNMENT = 64


class Arena:
    """Blocks of memory, each with one tensor at a time. Blocks used by recorded calls are kept."""

    def __init__(self) -> None:
        self._blocks: list[tuple[torch.Tensor, StorageWeakRef | None]] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous, of the shape and dtype of `tensor`."""
        size = tensor.numel() * tensor.element_size()
        free = [
            (block.numel(), index)
            for index, (block, user) in enumerate(self._blocks)
            if block.numel() >= size and (user is None or user.expired())
        ]
        if free:
            _, index = min(free)
        else:
            index = len(self._blocks)
            self._blocks.append((torch.empty(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8), None))
        block, _ = self._blocks[index]
        given = _alias(block, tensor)
        self._blocks[index] = block, StorageWeakRef(given.untyped_storage())
        return given

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, if it is of the arena, without keeping others from it."""
        of_tensor = (block for block, _ in self._blocks if block.data_ptr() == tensor.data_ptr())
        return next((_alias(block, tensor) for block in of_tensor), tensor)


def _alias(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The block's first bytes with the shape and dtype of `tensor`, and a storage of its own."""
    size = tensor.numel() * tensor.element_size()
    return torch.from_numpy(block[:size].numpy()).view(tensor.dtype).view(tensor.shape)
