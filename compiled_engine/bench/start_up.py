"""Start-up: from the start of a process to the first token, with an empty and with a filled compile cache."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.bench.fresh_process import run_worker
from compiled_engine.bench.workloads import summary
from compiled_engine.process.progress import Progress

KINDS = ("cold", "warm")


def measure(options: Mapping[str, Any], warm_up: int, repeats: int, progress: Progress) -> dict[str, Any]:
    """Cold and warm starts alternate; each pair has a temporary cache of its own.

    {"cold" and "warm": {"seconds": {"median", "spread"}, "cache": hit | miss | off, "start_up": spans of the start with
    the median, see `Timeline`}}. Seconds are seen from outside, to the first token. Files that the system keeps in
    memory stay there: a cold start reads warm files. Raises WorkerError if a start fails.
    """
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for repeat in range(-warm_up, repeats):
        with tempfile.TemporaryDirectory(prefix="compiled_engine_start_up_") as folder:
            for kind in KINDS:
                name = f"repeat {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up"
                with progress.stage(f"{name}: {kind}", total=1) as advance:
                    result = run_worker({**options, **_cache(options, Path(folder))}, None)
                    advance(1)
                if repeat >= 0:
                    results[kind].append(result)
    return {kind: _record(starts) for kind, starts in results.items()}


def _cache(options: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Where nothing is compiled there is no cache to empty."""
    return {} if options.get("mode") == "eager" else {"cache_dir": str(folder)}


def _record(starts: list[dict[str, Any]]) -> dict[str, Any]:
    in_order = sorted(starts, key=lambda start: start["wall_s"])
    middle = in_order[len(in_order) // 2]
    return {
        "seconds": summary([start["wall_s"] for start in starts]),
        "cache": middle["cache"],
        "start_up": middle["start_up"],
    }


def weights_bound_seconds(weight_bytes: int, bytes_per_s: float) -> float:
    """What no start can do without: writing the weights into the device's memory once."""
    return weight_bytes / bytes_per_s
