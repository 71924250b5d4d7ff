"""How long a step takes on its device, and how many kernels it launches: on a GPU as one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REPLAYS = 20


@dataclass(frozen=True)
class StepTime:
    """`microseconds()` measures once more: the mean of REPLAYS steps back to back. `kernels`: launches of a step."""

    microseconds: Callable[[], float]
    kernels: int | None
    by_kernel_us: dict[str, float]


def time_step(step: Callable[[], Any], device: torch.device) -> StepTime:
    """Warm a step up and, on a GPU, capture it; kernels are counted in a profiled replay."""
    if device.type != "cuda":
        step()
        return StepTime(lambda: _host_microseconds(step), None, {})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.replay()
    torch.cuda.synchronize()
    by_kernel = _profile(graph)
    return StepTime(
        lambda: _device_microseconds(graph),
        sum(count for count, _ in by_kernel.values()),
        {name: microseconds for name, (_, microseconds) in by_kernel.items()},
    )


def _profile(graph: torch.cuda.CUDAGraph) -> dict[str, tuple[int, float]]:
    """Kernel name -> (launches, microseconds of all) of one replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, total + event.device_time
    return found


def _device_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def _host_microseconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(REPLAYS):
        step()
    return (time.perf_counter() - start) * 1e6 / REPLAYS
