"""What a pass is, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx


@dataclass(frozen=True)
class CompileRange:
    """Token counts, both ends included, that one compiled version of the graph serves."""

    low: int
    high: int


@dataclass(frozen=True)
class PassResult:
    """`near_misses` say where a pattern began to match and why it did not."""

    matches: int
    near_misses: tuple[str, ...] = ()


class GraphPass(Protocol):
    """Rewrites a whole model's ATen graph in place, before it is split.

    `matches_per_layer` is the contract: how often it must match in a transformer layer of the known families.
    """

    name: str
    matches_per_layer: int

    def applicable(self, compile_range: CompileRange, device_type: str) -> bool: ...

    def run(self, graph: fx.Graph) -> PassResult: ...
