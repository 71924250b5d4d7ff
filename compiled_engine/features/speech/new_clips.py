"""The clips that a step encodes, in the extras of a SchedulerOutput: plain data from the plan to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.speech.extras import NAME


class NewClip(msgspec.Struct, frozen=True, array_like=True):
    """A clip that is encoded at a step's beginning."""

    slot: int
    inputs: Mapping[str, PlainTensor]  # the feature extractor's output, by its names


def new_clips_of(extras: Mapping[str, Any]) -> Sequence[NewClip]:
    """Return the clips that a step encodes, from its extras."""
    return msgspec.convert(extras.get(NAME, ()), tuple[NewClip, ...])
