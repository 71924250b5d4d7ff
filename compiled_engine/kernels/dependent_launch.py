"""Programmatic dependent launch: a kernel starts before the one that it depends on has ended."""

from __future__ import annotations

from functools import cache

import torch


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options to launch a kernel with that waits (gdc_wait) before it touches what other kernels read or write.

    It starts early from Hopper on; elsewhere DEPENDENT_LAUNCH is False, and it must not wait.
    """
    if device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9:
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}
