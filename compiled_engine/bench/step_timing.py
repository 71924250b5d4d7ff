"""How long a step takes on its device: on a GPU as one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

REPLAYS = 20


def time_step(step: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Warm a step up and, on a GPU, capture it. Each call of the result measures it: mean microseconds of REPLAYS steps
    back to back."""
    if device.type != "cuda":
        step()
        return lambda: _host_microseconds(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return lambda: _device_microseconds(graph)


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
