"""Cuts a plan into the plans of pipeline stages, and passes values between stages.

A plan is cut after attention ops. A stage calls pieces of the whole plan, so nothing is compiled for it. The values
that later stages need are sent from stage to stage as one tensor of bytes, in which each value is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.graphs.compiler.plan import Carried, Input, Plan
from compiled_engine.parallel.rank_share import LayerShare
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.registry import splitting_ops


@dataclass(frozen=True)
class Border:
    """The values that one pipeline stage sends to the next, in order. A value is [T, *row_shape], with T tokens."""

    values: tuple[Carried, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes per token of all values together."""
        return sum(map(_row_bytes, self.values))

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the concatenated bytes of all values: uint8 [T * row_bytes]."""
        return torch.cat([value.reshape(-1).view(torch.uint8) for value in values])

    def unpack(self, packed: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return the values that `pack` concatenated for `num_tokens` tokens, [num_tokens, *row_shape] each.

        The values are views of `packed`, which may be longer.
        """
        found, start = [], 0
        for value in self.values:
            end = start + num_tokens * _row_bytes(value)
            found.append(packed[start:end].view(_dtype(value)).view(num_tokens, *value.row_shape))
            start = end
        return found


def _dtype(value: Carried) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype


def _row_bytes(value: Carried) -> int:
    return math.prod(value.row_shape) * _dtype(value).itemsize


@dataclass(frozen=True)
class StagePlan:
    """The calls that a pipeline stage makes (a plan), and the values that the stage receives and sends."""

    plan: Plan
    received: Border | None = None  # None for the first stage
    sent: Border | None = None  # None for the last stage


def stage_plan(plan: Plan, stage: LayerShare) -> StagePlan:
    """Return the part of the whole plan that a stage runs. In it, the stage's KV caches are numbered from 0.

    Raises ValueError if there are several stages and the plan does not have one attention op per layer, or if a value
    that must be sent to the next stage has no row per token.
    """
    if stage.count == 1:
        return StagePlan(plan)
    known = splitting_ops()
    ends = [number for number, step in enumerate(plan.steps, 1) if step.op is not None and known[step.op].attends]
    layers = stage.layers
    if layers.stop > len(ends) or (stage.is_last and layers.stop != len(ends)):
        raise ValueError(f"the compiled model has {len(ends)} attentions, not one for each of {layers.stop} layers")
    first = 0 if stage.is_first else ends[layers.start - 1]
    end = len(plan.steps) if stage.is_last else ends[layers.stop - 1]
    received = () if stage.is_first else _crossing(plan, first)
    sent = () if stage.is_last else _crossing(plan, end)
    steps = plan.steps[first:end]

    used = {argument["value"] for step in steps for argument in step.arguments if "value" in argument}
    old_inputs = [index for index in range(len(plan.inputs)) if index in used]
    inputs = [_renumbered(plan.inputs[index], layers) for index in old_inputs]
    inputs += [Source("received", f"received.{number}") for number in range(len(received))]
    new = {old: number for number, old in enumerate([*old_inputs, *(value.value for value in received)])}
    for step in steps:
        new |= {old: len(new) + number for number, old in enumerate(step.results)}
    planned = tuple(step.renumbered(new) for step in steps)
    outputs = plan.outputs if stage.is_last else tuple(value.value for value in sent)
    # All stages have the same arguments, including those that only a later stage reads.
    arguments = plan.arguments if stage.is_first else (*plan.arguments, "received")
    return StagePlan(
        Plan(arguments, tuple(inputs), planned, tuple(new[index] for index in outputs)),
        None if stage.is_first else Border(received),
        None if stage.is_last else Border(sent),
    )


def _crossing(plan: Plan, place: int) -> tuple[Carried, ...]:
    """Return the values that are defined before the plan's step number `place`, and read by a later step or returned.

    Step `place` itself counts as later. Wider dtypes come first, so that each value's bytes are aligned to its elements
    for any number of tokens. Raises ValueError for a value without a row per token.
    """
    defined = {index for step in plan.steps[:place] for index in step.results}
    read = {a["value"] for step in plan.steps[place:] for a in step.arguments if "value" in a} | {*plan.outputs}
    known = {value.value: value for value in plan.carried}
    unknown = sorted(index for index in defined & read if index not in known)
    if unknown:
        raise ValueError(f"values {unknown} of the plan cannot be sent between stages")
    crossing = [known[index] for index in sorted(defined & read)]
    return tuple(sorted(crossing, key=lambda value: -_dtype(value).itemsize))


def _renumbered(source: Input, layers: range) -> Input:
    if isinstance(source, Parameter) or source.element is None:
        return source
    return replace(source, name=f"{source.name.partition('.')[0]}.{source.element - layers.start}")


class StageForward:
    """The forward of a pipeline stage, which takes the arguments of the whole model's forward.

    The forward reads the previous stage's values from `buffer` (uint8). It returns the values for the next stage as
    bytes (see Border.pack), or in the last stage the model's result. stitched: the function that runs the stage's plan.
    """

    def __init__(self, stitched: Callable[..., object], stage: StagePlan, buffer: torch.Tensor | None):
        self._stitched, self._buffer = stitched, buffer
        self._received, self._sent = stage.received, stage.sent

    @property
    def received_row_bytes(self) -> int:
        return self._received.row_bytes if self._received else 0

    def __call__(self, input_ids_T: torch.Tensor, *arguments: object) -> torch.Tensor:
        if self._received is not None:
            assert self._buffer is not None
            arguments = (*arguments, self._received.unpack(self._buffer, input_ids_T.shape[0]))
        found = self._stitched(input_ids_T, *arguments)
        if self._sent is not None:
            found = self._sent.pack(found if isinstance(found, tuple) else (found,))
        assert isinstance(found, torch.Tensor)
        return found
