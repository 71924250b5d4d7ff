"""What kernels take for granted of the strides of tensors."""

from __future__ import annotations

import torch


def require_dense(kv_cache_N2PKd: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless the cache is contiguous, and so are the elements of a row of each tensor."""
    if not kv_cache_N2PKd.is_contiguous():
        raise ValueError(f"kv_cache_N2PKd has strides {kv_cache_N2PKd.stride()}; allowed: those of a contiguous tensor")
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; allowed: 1")
