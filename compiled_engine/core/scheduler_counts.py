"""Counters of a scheduler for metrics: requests, steps and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compiled_engine.core.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class SchedulerCounts:
    least_free: int  # fewest free blocks after scheduling a step
    arrived: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0

    def begin_step(self, num_free: int) -> int:
        """Count a scheduled step that leaves this many blocks free; returns its number."""
        self.least_free = min(self.least_free, num_free)
        self.steps += 1
        return self.steps

    def metrics(self, kv_cache: KVCacheManager, *, running: int, waiting: int) -> dict[str, Any]:
        """Return current values and counts since the start.

        Current: running and waiting requests, kv_usage (share of held blocks, 0 to 1), blocks_free. Since the start:
        kv_usage_peak, prefix_queries and prefix_hits (prompt tokens), preemptions, finished (by a stop or the length),
        aborted, steps.
        """
        blocks, free = kv_cache.num_blocks, kv_cache.num_free_blocks
        total = max(blocks, 1)
        least_free, used = (self.least_free, 1 - free / total) if blocks else (total, 0.0)
        return {
            "running": running,
            "waiting": waiting,
            "kv_usage": used,
            "kv_usage_peak": 1 - least_free / total,
            "blocks_total": blocks,
            "blocks_free": free,
            "prefix_queries": kv_cache.prefix_queries,
            "prefix_hits": kv_cache.prefix_hits,
            "preemptions": self.preemptions,
            "finished": self.finished,
            "aborted": self.aborted,
            "steps": self.steps,
        }
