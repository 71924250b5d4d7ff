"""Measures a running engine: the time of each part of its steps, and traces of operators and kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepClock:
    """Sums the host time of each part of a step, and the device time, over all steps between `start` and `stop`."""

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
        """Add the host time since the last `lap`, or since `start`, to the part `name`. Does nothing when stopped."""
        if self._running:
            now = time.perf_counter()
            self._laps[name] += now - self._last
            self._last = now

    def device_begins(self) -> None:
        """Record a CUDA event before a step's first launch. Does nothing when stopped, or on a CPU."""
        if self._running and self._on_gpu:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            self._events.append(events)

    def device_ends(self) -> None:
        """Record a CUDA event after a step's last launch. Does nothing when stopped, or on a CPU."""
        if self._running and self._on_gpu:
            self._events[-1][1].record()

    def host_seconds(self) -> dict[str, float]:
        """Return the host time in seconds of each part, by name, summed over all steps since `start`."""
        return dict(self._laps)

    def device_seconds(self) -> float:
        """Return the time in seconds from each step's first to its last kernel, summed over all steps since `start`.

        Waits for the device. 0 on a CPU.
        """
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
        """Start a trace. prefix: the beginning of the trace's file name, "trace" if None.

        Raises RuntimeError if a trace is running, ValueError for a prefix that cannot be part of a file name, and
        OSError if the folder cannot be created.
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
        """Wait for all launched kernels, stop the trace, write it and return the path of its file.

        Raises RuntimeError if no trace is running.
        """
        if self._running is None:
            raise RuntimeError("no profile is running; call start_profile() first")
        (trace, path), self._running = self._running, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        trace.stop()
        trace.export_chrome_trace(str(path))
        return path
