"""The memory of a rank's large tensors: its weights and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Memory(Protocol):
    """Interface of a feature that provides device memory for a rank's tensors."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised memory on the device, uint8 [num_bytes], aligned for every dtype and kernel."""
        ...


@dataclass(frozen=True)
class RankMemory:
    """The memory in which a rank allocates its weights and its KV cache. None in a field: PyTorch's own."""

    # Only tensors that a weight update fills: neither buffers nor state that a pass keeps.
    weights: Memory | None = None
    kv_cache: Memory | None = None
