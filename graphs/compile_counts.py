"""How much a start had to trace and to compile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileCounts:
    """What this process had to do: zero traces and zero compiles (unique pieces made) on a warm start."""

    traces: int
    compiles: int
