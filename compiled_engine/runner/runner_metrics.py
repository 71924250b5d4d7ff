"""What the runner tells of itself: counts of the compiler and of graphs, and how it started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordingCounts
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner.captured_steps import CapturedSteps
from compiled_engine.runner.kv_cache import CacheSize


def runner_metrics(
    compiled: CompiledModel | None,
    captured: CapturedSteps,
    cache_size: CacheSize,
    timeline: Timeline,
    recordings: Sequence[RecordingCounts],
) -> dict[str, Any]:
    """Counts of traces, compiles, captures and replays, cache status, start-up seconds, memory of cache and graphs.

    recordings: of each forward whose calls are recorded.
    """
    counts = compiled.counts if compiled else None
    graphs = captured.graphs
    return {
        "traces": counts.traces if counts else 0,
        "compiles": counts.compiles if counts else 0,
        "captures": graphs.num_captures if graphs else 0,
        "cache": compiled.lookup.status if compiled else "off",
        "cache_why": compiled.lookup.why if compiled else "nothing is compiled",
        "cache_key": compiled.lookup.key if compiled else None,
        "cache_entry": str(compiled.lookup.folder) if compiled else None,
        "passes": _pass_counts(compiled),
        **captured.counters.metrics(),
        **cache_size.metrics(graphs.bytes_used if graphs else 0),
        "graph_bytes_predicted": cache_size.graph_bytes,
        "graph_bytes_used": graphs.bytes_used if graphs else 0,
        "graph_bytes_by_key": {name: r._asdict() for name, r in graphs.memory_by_key.items()} if graphs else {},
        "capture_seconds": graphs.capture_seconds if graphs else 0.0,
        "recordings": sum(counts.recordings for counts in recordings),
        "recorded_kernels": max((counts.kernels for counts in recordings), default=0),
        "recorded_replays": sum(counts.replays for counts in recordings),
        "start_up_seconds": timeline.seconds(),
        "start_up": timeline.as_records(),
    }


def _pass_counts(compiled: CompiledModel | None) -> dict[str, dict[str, dict[str, int]]]:
    """By callable and range, see CompiledRange.name, and by pass name: how often it matched, and had to."""
    if compiled is None:
        return {}
    return {
        compiled_range.name: {
            report.name: {"matches": report.matches, "contract": report.contract}
            for report in compiled_range.passes
            if report.applied
        }
        for compiled_range in compiled.ranges
        if compiled_range.passes
    }
