"""GraphPass, the protocol that passes implement, and PassResult, which a run of a pass returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor


@dataclass(frozen=True)
class CompileRange:
    """A range of token counts, both ends included. Batches in it run the same compiled version of the model."""

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
    """A node that a pass replaced, and the node that computes the same value now."""

    before: str  # name of the old node
    after: fx.Node


@dataclass(frozen=True)
class PassResult:
    """The result of running a pass on a graph: its matches, and the nodes it replaced, for the verifier and reports."""

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
    """A pass: it rewrites the whole model's ATen graph in place, before the graph is split into parts to compile.

    Passes derive from this class, which has defaults for the optional members.
    """

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
        """Return None if the pass applies to the range and device; otherwise why it does not, for the report."""
        return None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the least number of times that the pass must match. graph: as it is before the first pass runs.

        Count a feature that every variant of the pattern has, such as the rsqrt of a norm, rather than call the pass's
        own matcher. A variant that the matcher does not recognise is then counted too, and the pass is reported to have
        matched less often than its contract.
        """
        ...

    def step_tensors(self) -> tuple[StepTensor, ...]:
        """Return descriptions of the inputs that the pass adds to the model's forward.

        If the pass is enabled, the graph has a placeholder for each of them, which `graph_inputs.argument` finds.
        """
        return ()

    def run(self, graph: fx.Graph) -> PassResult: ...

    def keep(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Receive the parameters that passes added for values of their own (role KEPT), by name, after allocation.

        These tensors start as zeros and never move, so the pass may write to them now and between steps.
        """
        return  # a method of a protocol without a body would be required of every pass

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Check the rewritten graph and return the number of values that were compared.

        The default returns None: the verifier then compares the replacements in `result`. Raises VerificationError if a
        value differs.
        """
        return None
