"""A tensor on device memory that it does not own.

The results of a captured piece live in the graphs' memory pool. The next replay needs to know where; it must not keep
them alive, or no other graph could use the memory again.
"""

from __future__ import annotations

from typing import Any

import torch

_INTEGERS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Memory:
    """What `torch.as_tensor` reads, by the protocol that CUDA libraries share. It has no type for bfloat16, so it
    speaks of integers of the same size."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": _INTEGERS[size],
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def alias_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, shape, strides and dtype. Valid as long as someone else keeps the memory."""
    if tensor.numel() == 0:
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
