"""Programmatic dependent launch: whether a kernel may start before the one that it depends on has ended."""

from __future__ import annotations

from functools import cache

import torch


@cache
def may_launch_early(device: torch.device) -> bool:
    """True from Hopper on: the kernel then waits (gdc_wait) before it touches what other kernels read or write."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9
