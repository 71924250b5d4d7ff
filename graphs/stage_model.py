"""Cuts a compiled model to the part that a pipeline stage runs. All stages load the same cache entry."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.graphs.compiled_model import BoundRange, CompiledModel
from compiled_engine.graphs.compiler.compiled_range import CompiledRange
from compiled_engine.graphs.compiler.signature import FORWARD, LOGITS
from compiled_engine.graphs.compiler.stage_plan import StageForward, stage_plan
from compiled_engine.parallel.rank_share import LayerShare


def stage_model(compiled: CompiledModel, stage: LayerShare, most_tokens: int, device: torch.device) -> CompiledModel:
    """Return the part of the compiled model that `stage` runs, for steps of up to `most_tokens` tokens.

    The stage's forwards take the whole model's arguments, and read the previous stage's activations from the tensor
    `received` of the returned model, which is on `device`. In all stages but the last, the forwards return activations
    for the next stage instead of hidden states or logits. If there is only one stage, `compiled` itself is returned.
    Raises ValueError if `stage_plan` does.
    """
    if stage.count == 1:
        return compiled
    plans = [(each, stage_plan(each.plan, stage)) for each in compiled.of(FORWARD)]
    row_bytes = max(plan.received.row_bytes if plan.received else 0 for _, plan in plans)
    received = torch.zeros(most_tokens * row_bytes, dtype=torch.uint8, device=device) if row_bytes else None

    def between_borders(r: CompiledRange, bound: BoundRange) -> BoundRange:
        if r.staged is None:
            return bound
        forward = StageForward(bound.call, r.staged, received)
        return replace(bound, call=forward, received_row_bytes=forward.received_row_bytes)

    logits = compiled.of(LOGITS) if stage.is_last else ()
    ranges = (*(replace(each, staged=plan) for each, plan in plans), *logits)
    return replace(compiled, ranges=ranges, wrap=between_borders, received=received)
