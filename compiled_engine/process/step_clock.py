"""Where the time of a step goes: laps of the host, and what the device works. Stopped unless somebody measures."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class StepClock:
    """Sums over steps; `start` begins, `stop` ends a measurement."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._last = 0.0
        self._laps: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._laps.clear()
        self._events.clear()
        self._running, self._last = True, time.perf_counter()

    def stop(self) -> None:
        self._running = False

    def lap(self, name: str) -> None:
        """The host has done this since the lap before."""
        if self._running:
            now = time.perf_counter()
            self._laps[name] += now - self._last
            self._last = now

    def device_begins(self) -> None:
        """What a step launches on the device comes now."""
        if self._running and self._on_gpu:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            self._events.append(events)

    def device_ends(self) -> None:
        """All of it is launched."""
        if self._running and self._on_gpu:
            self._events[-1][1].record()

    def host_seconds(self) -> dict[str, float]:
        """By lap, over all steps since the start."""
        return dict(self._laps)

    def device_seconds(self) -> float:
        """From the first to the last kernel of each step, over all steps; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
