"""What a pass is, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from compiled_engine.attention.step_tensors import StepTensor
from compiled_engine.passes.structure import Structure


@dataclass(frozen=True)
class CompileRange:
    """Token counts, both ends included, for which the model is compiled once.

    The code of a `small` range, for small batches, returns the logits of every token; other code hidden states.
    """

    low: int
    high: int
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"

    def __contains__(self, num_tokens: int) -> bool:
        return self.low <= num_tokens <= self.high


@dataclass(frozen=True)
class Replacement:
    """The value that node `before` (its name) had before the pass is now the value of node `after`."""

    before: str
    after: fx.Node


@dataclass(frozen=True)
class PassResult:
    """`near_misses` say where a pattern began to match and why it did not; the verifier compares `replacements`."""

    matches: int
    near_misses: tuple[str, ...] = ()
    replacements: tuple[Replacement, ...] = ()


class GraphPass(Protocol):
    """Rewrites a whole model's ATen graph in place, before it is split.

    A pass that derives from this class need not define `applicable` and `step_tensors`.
    """

    name: str

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        """None where the pass applies, otherwise why it does not; here it applies everywhere."""
        return None

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        """How often the pass must match in a graph that had this structure before any pass ran."""
        ...

    def step_tensors(self) -> tuple[StepTensor, ...]:
        """The step tensors that the pass reads beside those of every forward; `graph_inputs.argument` finds their
        inputs in the graph. They exist wherever the pass is enabled."""
        return ()

    def run(self, graph: fx.Graph) -> PassResult: ...
