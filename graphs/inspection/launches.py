"""The number of kernels that a decode step launches on the device, counted by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def kernels_per_decode_step(generate: Callable[[int], None], device: torch.device) -> int | None:
    """Kernels of one decode step of one request; None without a GPU.

    generate: produces the given number of tokens for a short prompt, one step per token.
    """
    if device.type != "cuda":
        return None
    return _kernels(lambda: generate(4)) - _kernels(lambda: generate(3))


def _kernels(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
