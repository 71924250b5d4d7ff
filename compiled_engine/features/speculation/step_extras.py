"""The extras of a step that the plan of drafts sends to the draft head: how sharply to sample drafts."""

from __future__ import annotations

from compiled_engine.engine.messages import SchedulerOutput

NAME = "speculation"


def set_sharpness(step: SchedulerOutput, sharpness: float) -> None:
    """Have the step's drafts sampled from the logits times `sharpness`, see SpeculationConfig.sharpnesses."""
    if sharpness != 1.0:
        step.extras[NAME] = sharpness


def sharpness_of(step: SchedulerOutput) -> float:
    sharpness: float = step.extras.get(NAME, 1.0)
    return sharpness
