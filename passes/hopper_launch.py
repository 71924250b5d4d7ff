"""Conditions of both Hopper kernels of linears on the device and their tokens."""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.profile import DeviceProfile, load_profile


def hopper_profile(dtype: torch.dtype, device: torch.device) -> DeviceProfile | None:
    """The device's profile, if it is a Hopper and the dtype has two bytes; otherwise None."""
    if dtype.itemsize != 2 or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return load_profile(torch.cuda.get_device_name(device))


def rows_for_boxes(x_TK: torch.Tensor) -> torch.Tensor:
    """The same rows where boxes of them can be copied: each is dense and begins at a multiple of 16 bytes."""
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        return x_TK.clone(memory_format=torch.contiguous_format)
    return x_TK


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
