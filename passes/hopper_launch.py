"""What the launches of both kernels of linears on Hopper ask of the device and of their tokens."""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.profile import DeviceProfile, load_profile


def hopper_profile(dtype: torch.dtype, device: torch.device) -> DeviceProfile | None:
    """What was measured on this device, if it is a Hopper and computes in two bytes; None elsewhere."""
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
