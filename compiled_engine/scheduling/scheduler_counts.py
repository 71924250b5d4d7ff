"""What the scheduler counts since it started, and the figures made of it."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.scheduling.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class SchedulerCounts:
    """Requests and steps, but for `least_free`: the fewest free blocks that there were after a step was scheduled."""

    least_free: int
    arrived: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0

    def begin_step(self, num_free: int) -> int:
        """A step is scheduled, which leaves so many blocks free; its number."""
        self.least_free = min(self.least_free, num_free)
        self.steps += 1
        return self.steps

    def metrics(self, kv_cache: KVCacheManager, *, running: int, waiting: int) -> dict[str, int | float]:
        """Now: running and waiting (requests), kv_usage (share of the blocks held, 0 to 1), blocks_free.

        Since the start: kv_usage_peak, prefix_queries and prefix_hits (prompt tokens), preemptions, finished
        (by a stop or the length), aborted, steps.
        """
        total, free = kv_cache.num_blocks, kv_cache.num_free_blocks
        return {
            "running": running,
            "waiting": waiting,
            "kv_usage": 1 - free / total,
            "kv_usage_peak": 1 - self.least_free / total,
            "blocks_total": total,
            "blocks_free": free,
            "prefix_queries": kv_cache.prefix_queries,
            "prefix_hits": kv_cache.prefix_hits,
            "preemptions": self.preemptions,
            "finished": self.finished,
            "aborted": self.aborted,
            "steps": self.steps,
        }
