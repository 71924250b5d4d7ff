"""Measure the engine at work: times of the parts of its steps, and traces of every operator and kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepClock:
    """Sums times over steps, from `start` to `stop`."""

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
        """Add the host time since the previous lap to this name."""
        if self._running:
            now = time.perf_counter()
            self._laps[name] += now - self._last
            self._last = now

    def device_begins(self) -> None:
        """Mark the start of a step's launches on the device."""
        if self._running and self._on_gpu:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            self._events.append(events)

    def device_ends(self) -> None:
        """Mark the end of a step's launches."""
        if self._running and self._on_gpu:
            self._events[-1][1].record()

    def host_seconds(self) -> dict[str, float]:
        """Return seconds by lap, over all steps since the start."""
        return dict(self._laps)

    def device_seconds(self) -> float:
        """Return the time from the first to the last kernel of each step, summed over steps; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3


class Profiler:
    """Writes Chrome traces (gzipped JSON, for ui.perfetto.dev or chrome://tracing) into a folder.

    A trace holds the operators that the caller's thread runs, and the kernels of `device`.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._running: tuple[profile, Path] | None = None

    @property
    def running(self) -> bool:
        return self._running is not None

    def start(self, prefix: str | None = None) -> None:
        """Start a trace. prefix: beginning of its file name, "trace" if None.

        Raises RuntimeError if one is running, ValueError for a prefix that is not part of a file name, and OSError if
        the folder cannot be created.
        """
        if self.running:
            raise RuntimeError("a profile is running; call stop_profile() first")
        name = "trace" if prefix is None else prefix
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"profile_prefix is {prefix!r}; allowed: the beginning of a file's name, or None")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}-{time.time_ns()}.pt.trace.json.gz"
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        trace = profile(activities=activities)
        trace.start()
        self._running = trace, path

    def stop(self) -> Path:
        """Stop the trace, write it and return its file; all kernels launched so far are included.

        Raises RuntimeError if none is running.
        """
        if self._running is None:
            raise RuntimeError("no profile is running; call start_profile() first")
        (trace, path), self._running = self._running, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        trace.stop()
        trace.export_chrome_trace(str(path))
        return path
