"""Adds up the time of the vision tower's runs, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TowerClock:
    """Measures runs: on a GPU by CUDA events, between the first and the last launch of a run; on a CPU by wall time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # in the order of their launch

    @contextmanager
    def run(self) -> Iterator[None]:
        """Measure a `with` block: on a GPU the work that it launches in the current stream, on a CPU its wall time."""
        self._collect()
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._running.append(events)

    def seconds(self) -> float:
        """Return the seconds of all runs together that the device has completed."""
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
