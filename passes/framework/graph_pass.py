"""The protocol of passes, and their reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor


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
    """`near_misses` say where a pattern began to match and why it did not; the verifier compares `replacements`. notes:
    what a report says besides, a line for each thing."""

    matches: int
    near_misses: tuple[str, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplittingOp:
    """An op that graphs are split at, since it writes to its arguments, as to a KV cache.

    name: its name in torch, compiled_engine::attention. function: what the compiled forward calls in the op's place,
    without torch's dispatcher. attends: attention's result is there after the op, so a pipeline may be cut behind it.
    around: for an op of which attention is a part, makes the function that calls another function for this part.
    """

    name: str
    function: Callable[..., Any]
    attends: bool = False
    around: Callable[[Callable[..., None]], Callable[..., Any]] | None = None


@runtime_checkable
class GraphPass(Protocol):
    """Rewrites a whole model's ATen graph in place, before it is split. A pass derives from this class.

    requires: names of passes that this one needs. splitting_ops: introduced by the pass. kernel_token_counts: token
    counts at which it switches kernels. required: a missed match changes the result, so falling short of the contract
    is an error in any mode. uuid: replaces the digest of the source in the cache key, for a pass without a source file;
    it must change with the pass.
    """

    name: str
    requires: tuple[str, ...] = ()
    splitting_ops: tuple[SplittingOp, ...] = ()
    kernel_token_counts: tuple[int, ...] = ()
    required: bool = False
    uuid: str | None = None

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        """Return None if the pass applies, otherwise the reason; by default it applies everywhere."""
        return None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return how often the pass must match, counted in the graph before any pass ran.

        The count uses a mark that the pattern cannot lack, not the pattern: unknown variants count too; the pass then
        falls short and reports why.
        """
        ...

    def step_tensors(self) -> tuple[StepTensor, ...]:
        """The step tensors that the pass reads in addition to those of every forward. They exist wherever the pass is
        enabled; `graph_inputs.argument` finds their inputs in the graph."""
        return ()

    def run(self, graph: fx.Graph) -> PassResult: ...

    def keep(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the kept parameters of a model's graphs, by name, when they have memory. They are zeros, and their
        memory stays the same, so the pass may write them now and between steps."""
        return  # without a body it would have to be there in every pass

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Check the graph after the pass, and return how many values were compared.

        None, as here: the verifier is to compare the replacements. Raises VerificationError.
        """
        return None
