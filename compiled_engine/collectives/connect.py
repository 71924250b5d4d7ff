"""How a process becomes one of the ranks."""

from __future__ import annotations

from pathlib import Path

from compiled_engine.collectives.gloo import GlooGroup
from compiled_engine.collectives.group import Group, StandIn
from compiled_engine.config import EngineConfig


def connect(config: EngineConfig, rank: int, folder: Path) -> Group:
    """Join the group as `rank`; waits for the other ranks. folder: an empty one, private to them."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return StandIn()
    return GlooGroup(rank, size, folder)
