"""Measure the time from process start to the first token, with an empty and with a filled compile cache."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_engine.bench.processes import run_worker, seconds_to_print
from compiled_engine.bench.workloads import summary
from compiled_engine.process.progress import Progress

KINDS = ("cold", "warm")
TORCH_ALONE = "import sys, torch; print(torch.ones(1, device=sys.argv[1]).item(), flush=True)"


class Starts(NamedTuple):
    """Figures of cold and of warm starts, and of a process with PyTorch alone."""

    # By "cold" and "warm": seconds (median, spread) to the first token, measured from outside; cache (hit, miss, off);
    # and start_up, the spans of the median start, see `Timeline`.
    kinds: dict[str, dict[str, Any]]
    torch_alone: dict[str, Any]  # median and spread of the function of that name


def measure(options: Mapping[str, Any], device: torch.device, warm_up: int, repeats: int, progress: Progress) -> Starts:
    """Measure starts of PyTorch alone, cold starts and warm starts in turn, and return their figures.

    warm_up: uncounted rounds before the `repeats` counted rounds. device: as in the engine's options.

    Each cold start has a new compile cache, which the warm start after it uses. Files stay in the system's page cache,
    also for cold starts. Raises ProcessError if a start fails.
    """
    alone: list[float] = []
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for repeat in range(-warm_up, repeats):
        name = f"repeat {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up"
        with progress.stage(f"{name}: torch alone", total=1) as advance:
            seconds = torch_alone(device)
            advance(1)
        if repeat >= 0:
            alone.append(seconds)
        with tempfile.TemporaryDirectory(prefix="compiled_engine_start_up_") as folder:
            for kind in KINDS:
                with progress.stage(f"{name}: {kind}", total=1) as advance:
                    result = run_worker({**options, **_cache(options, Path(folder))}, None)
                    advance(1)
                if repeat >= 0:
                    results[kind].append(result)
    return Starts({kind: _record(starts) for kind, starts in results.items()}, summary(alone))


def torch_alone(device: torch.device) -> float:
    """Return the seconds from process start to a number computed by PyTorch on the device, the lower bound of a start.

    Raises ProcessError if the process fails.
    """
    return seconds_to_print(TORCH_ALONE, str(device))


def _cache(options: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the option cache_dir for this folder; {} for an eager engine, which compiles nothing."""
    return {} if options.get("mode") == "eager" else {"cache_dir": str(folder)}


def _record(starts: list[dict[str, Any]]) -> dict[str, Any]:
    in_order = sorted(starts, key=lambda start: start["wall_s"])
    middle = in_order[len(in_order) // 2]
    return {
        "seconds": summary([start["wall_s"] for start in starts]),
        "cache": middle["cache"],
        "start_up": middle["start_up"],
    }
