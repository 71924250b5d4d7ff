"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, made in the current stream's order; `values` may be changed at once.

    The pinned memory in between is fresh: PyTorch's allocator does not reuse it before the copy is done.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(values, order="C"))
    pinned = torch.empty(values.shape, dtype=torch.from_numpy(np.empty(0, values.dtype)).dtype, pin_memory=True)
    pinned.numpy()[...] = values  # PyTorch would wake all its threads for it
    return pinned.to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, to be read once the current stream has come this far; on a CPU `values` itself."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
