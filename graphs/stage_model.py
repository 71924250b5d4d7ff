"""The part of a compiled model that a pipeline stage runs; all stages load the same cache entry."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.compiler.compiled_range import CompiledRange
from compiled_engine.graphs.compiler.signature import FORWARD, LOGITS
from compiled_engine.graphs.compiler.stage_plan import StageForward, stage_plan
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.parallel.stages import Stage


def stage_model(compiled: CompiledModel, stage: Stage) -> CompiledModel:
    """Return the stage's part of the model. Raises ValueError, see stage_plan.

    Its forwards take the whole model's arguments, and read the previous stage's activations from the tensor `received`.
    In a stage that is not the last they return activations for the next one, in place of hidden states and of logits.
    """
    if stage.count == 1:
        return compiled
    forwards = (replace(each, staged=stage_plan(each.plan, stage)) for each in compiled.of(FORWARD))
    logits = compiled.of(LOGITS) if stage.is_last else ()
    return replace(compiled, ranges=(*forwards, *logits), wrap=_between_borders)


def _between_borders(compiled: CompiledRange, forward: Forward, received: torch.Tensor | None) -> Forward:
    return forward if compiled.staged is None else StageForward(forward, compiled.staged, received)
