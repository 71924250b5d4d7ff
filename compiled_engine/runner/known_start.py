"""Marks of starts whose kernels are all compiled: empty files in the folder of kernels, so that they go with these.

A start of another configuration may need further kernels of a compiled model that is in the cache: with drafts, for
one. Which they are only its warm-up shows, one at a time, so any start without a mark starts workers to compile them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.start_factors import start_factors

# Fields that choose no kernel, or beginnings of them.
OF_NO_KERNEL = (
    *("cache.num_blocks", "cache.gpu_memory_utilization", "cache.enable_prefix_caching", "scheduler.", "graph."),
    *("compile.ranges", "compile.workers", "compile.strict", "compile.verify", "parallel.data_parallel_size"),
)


def mark_of_start(kernels: Path, config: EngineConfig, stage: int = 0) -> Path:
    """Return the file that exists if a start with such kernels has ended well. stage: of a pipeline."""
    factors = start_factors(config, stage)
    fields = {name: value for name, value in factors["config"].items() if not name.startswith(OF_NO_KERNEL)}
    return kernels / f"start_{factors_key(factors | {'config': fields})}"


def leave_mark(mark: Path) -> None:
    """Note that the start has ended well; where nothing can be written, the next one starts workers again."""
    with suppress(OSError):
        mark.touch(mode=0o600)
