"""The protocol that passes implement, and the results they report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor


@dataclass(frozen=True)
class CompileRange:
    """A range of token counts, ends included, that shares one compiled version of the model."""

    low: int
    high: int
    small: bool = False  # made for small batches; returns logits of all tokens instead of hidden states

    @property
    def name(self) -> str:
        return f"{self.low}-{self.high}"

    def __contains__(self, num_tokens: int) -> bool:
        return self.low <= num_tokens <= self.high


@dataclass(frozen=True)
class Replacement:
    """A value that a pass replaced: the new node computes what the old one did."""

    before: str  # name of the old node
    after: fx.Node


@dataclass(frozen=True)
class PassResult:
    """The matches of one run of a pass, and what the verifier and the reports need."""

    matches: int
    near_misses: tuple[str, ...] = ()  # candidates that did not match, with the reason
    replacements: tuple[Replacement, ...] = ()  # compared by the verifier
    notes: tuple[str, ...] = ()  # further lines of the report


@dataclass(frozen=True)
class SplittingOp:
    """An op that graphs are split at because it writes to its arguments, such as the KV cache."""

    name: str  # in torch: compiled_engine::attention
    function: Callable[..., Any]  # called in the op's place by the compiled forward, past torch's dispatcher
    attends: bool = False  # attention is complete after the op, so a pipeline may be cut there
    # For an op that contains attention: returns `function` with the given function in attention's place.
    around: Callable[[Callable[..., None]], Callable[..., Any]] | None = None


@runtime_checkable
class GraphPass(Protocol):
    """A rewrite of the whole model's ATen graph, in place, before splitting. A pass derives from this class."""

    name: str
    requires: tuple[str, ...] = ()  # names of passes that must be enabled
    splitting_ops: tuple[SplittingOp, ...] = ()  # ops of the pass that write to their arguments
    kernel_token_counts: tuple[int, ...] = ()  # token counts at which the pass switches kernels
    # A missed match changes the results, so that falling short of the contract is an error in every mode.
    required: bool = False
    # In the cache key in place of the digest of the pass's source, for a pass without a source file. It must change
    # with the pass.
    uuid: str | None = None

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        """Return None if the pass applies to the range and device, otherwise the reason why not."""
        return None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return how often the pass must match, counted in the graph before any pass ran.

        Count an independent mark of the pattern rather than the pattern itself. Variants that the pass does not know
        are then counted too; the pass falls short of its contract and reports why.
        """
        ...

    def step_tensors(self) -> tuple[StepTensor, ...]:
        """Return the step tensors that the pass reads in addition to those of every forward.

        These tensors exist wherever the pass is enabled; `graph_inputs.argument` finds their inputs in the graph.
        """
        return ()

    def run(self, graph: fx.Graph) -> PassResult: ...

    def keep(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Receive the kept parameters of the model's graphs, by name, once they are allocated.

        These tensors start as zeros and stay at their addresses, so the pass may write them now and between steps.
        """
        return  # without a body it would have to be there in every pass

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Check the graph after the pass and return the number of compared values.

        None, the default, lets the verifier compare the replacements. Raises VerificationError.
        """
        return None
