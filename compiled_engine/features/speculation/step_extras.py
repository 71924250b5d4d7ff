"""The extras of drafts in a step: the plan tells the head how sharp the drafts are to be sampled."""

from __future__ import annotations

from compiled_engine.engine.messages import SchedulerOutput

NAME = "speculation"


def set_sharpness(step: SchedulerOutput, sharpness: float) -> None:
    """Have the step's drafts sampled from `sharpness` times the logits (see SpeculationConfig.sharpnesses)."""
    if sharpness != 1.0:
        step.extras[NAME] = sharpness


def sharpness_of(step: SchedulerOutput) -> float:
    sharpness: float = step.extras.get(NAME, 1.0)
    return sharpness
