"""The model's forward, eager or compiled, and what comes of it: hidden states or logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.op import OnAttention
from compiled_engine.attention.step_tensors import ForwardArguments
from compiled_engine.graphs.compiled_model import CompiledModel, Forwards
from compiled_engine.graphs.compiler.stage_plan import StageForward
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordedForward, RecordingCounts, recorded
from compiled_engine.graphs.cuda_graphs.segments import AttentionsOfEagerCode


@dataclass(frozen=True)
class ForwardOutput:
    """The hidden states or the logits of every token, [T, D] or [T, V], V columns of a rank."""

    tensor: torch.Tensor
    is_logits: bool


class ModelForward:
    """Calls the forward that is compiled for the number of tokens, or the eager model.

    on_attention: what `run(..., around_attention=True)` calls in place of the attention ops; None if nobody will.
    most_tokens: of a batch. records: on a CPU batches of decodes are recorded and replayed. A stage with others
    behind it returns what it hands on for hidden states and logits alike.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: CompiledModel | None,
        parameters: Mapping[str, torch.Tensor],
        on_attention: OnAttention | None,
        most_tokens: int = 0,
        records: bool = False,
    ):
        self._received: torch.Tensor | None = None
        if compiled:
            if row_bytes := compiled.received_row_bytes:
                device = next(iter(parameters.values())).device
                self._received = torch.zeros(most_tokens * row_bytes, dtype=torch.uint8, device=device)
            self._whole = self._parts = compiled.bind(parameters, None, self._received)
            if records:
                self._whole = self._parts = recorded(compiled, self._whole)
            if on_attention is not None:
                self._parts = compiled.bind(parameters, on_attention, self._received)
        else:
            self._whole = self._parts = Forwards(model, model.logits)  # type: ignore[arg-type]
            if on_attention is not None:
                self._parts = Forwards(_EagerParts(model, on_attention))
        self._distinct_whole, self._distinct_parts = self._whole, self._parts
        if compiled and not records:
            self._distinct_whole = self._distinct_parts = compiled.bind(parameters, None, self._received, distinct=True)
            if on_attention is not None:
                self._distinct_parts = compiled.bind(parameters, on_attention, self._received, distinct=True)
        self.logits = self._whole.logits

    def ends_at_logits(self, num_tokens: int) -> bool:
        """Whether the forward for so many tokens returns logits unless it is told otherwise."""
        return self._whole.for_logits(num_tokens) is not None

    def received(self, num_tokens: int, *, hidden_wanted: bool = False) -> torch.Tensor | None:
        """Where `run` finds what the stage before hands on, uint8 of its size; None in the first stage."""
        if self._received is None:
            return None
        small = None if hidden_wanted else self._whole.for_logits(num_tokens)
        forward = self._whole.hidden if small is None else small
        assert isinstance(forward, StageForward)
        return self._received[: num_tokens * forward.received_row_bytes]

    def run(
        self,
        num_tokens: int,
        arguments: ForwardArguments,
        *,
        hidden_wanted: bool = False,
        around_attention: bool = False,
        distinct: bool = False,
    ) -> ForwardOutput:
        """The forward of a batch of num_tokens tokens. hidden_wanted: logits will not do. distinct: one call of each
        kind where the model is compiled, see `distinct_calls`; its values mean nothing."""
        if distinct:
            forwards = self._distinct_parts if around_attention else self._distinct_whole
        else:
            forwards = self._parts if around_attention else self._whole
        small = None if hidden_wanted else forwards.for_logits(num_tokens)
        if small is not None:
            return ForwardOutput(small(*arguments), is_logits=True)
        return ForwardOutput(forwards.hidden(*arguments), is_logits=False)

    def recording_counts(self) -> list[RecordingCounts]:
        """Of each forward whose calls are recorded."""
        return [forward.counts for _, forward in self._whole.small if isinstance(forward, RecordedForward)]

    def close(self) -> None:
        """Drop the last references to the weights."""
        self._whole = self._parts = self._distinct_whole = self._distinct_parts = Forwards(nn.Identity())
        self.logits = nn.Identity()


class _EagerParts:
    """The eager model with its attention ops passed on."""

    def __init__(self, model: nn.Module, on_attention: OnAttention):
        self._model, self._on_attention = model, on_attention

    def __call__(self, *arguments: Any) -> torch.Tensor:
        with AttentionsOfEagerCode(self._on_attention):
            return self._model(*arguments)
