"""A profile of the engine at work: every operator and kernel with its time, in a file for a trace viewer."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profiler:
    """Writes Chrome traces (gzipped JSON, for ui.perfetto.dev or chrome://tracing) into a folder.

    device: whose kernels are in the trace, beside the operators that the caller's thread runs.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._running: tuple[profile, Path] | None = None

    @property
    def running(self) -> bool:
        return self._running is not None

    def start(self, prefix: str | None = None) -> None:
        """Begin a trace. prefix: how its file's name begins, "trace" if None.

        Raises RuntimeError if one is running, ValueError for a prefix that is not part of a file name, and OSError if
        the folder cannot be made.
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
        """End the trace, all kernels launched so far included, and write it; its file.

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
