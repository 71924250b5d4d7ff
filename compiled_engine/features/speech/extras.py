"""Defines audio clips as plain data, which messages have in their field `extras`.

An EngineRequest has its clip, and a SchedulerOutput has the clips that the step encodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features.images.extras import PlainTensor

NAME = "speech"
# Names of a clip's inputs: features [num_mel_bins, num_frames], as the extractor's output names them, or samples in
# float32, [at most num_samples], at the extractor's rate. A clip has one of them.
FEATURES, SAMPLES = "input_features", "samples"
ClipInputs = Mapping[str, PlainTensor]
# The key in a request's extra_args for the rules of transcriptions, and its values: without timestamps, and with them.
TRANSCRIPTION = "transcription"
TRANSCRIPTIONS = ("text", "timestamps")


class PromptClip(msgspec.Struct, frozen=True, array_like=True):
    """The audio of a prompt, whose samples or features follow when the core asks for them."""

    key: str  # hex digest of the audio; clips with the same key have the same keys and values


class NewClip(msgspec.Struct, frozen=True, array_like=True):
    """A clip that is encoded at a step's beginning."""

    slot: int
    inputs: ClipInputs


def clip_of(request: EngineRequest) -> PromptClip | None:
    """Return the clip of a request, or None if it has none."""
    given = request.extras.get(NAME)
    return None if given is None else msgspec.convert(given, PromptClip)


def extras_of(key: str) -> dict[str, Any]:
    """Return the entries for EngineRequest.extras of a request whose clip has this key."""
    return {NAME: PromptClip(key)}


def blank_clip(name: str, *shape: int) -> ClipInputs:
    """Return the inputs of a clip of zeros in float32. name: FEATURES or SAMPLES. shape: of this input."""
    return {name: PlainTensor("float32", shape, bytes(4 * math.prod(shape)))}


def new_clips_of(extras: Mapping[str, Any]) -> Sequence[NewClip]:
    """Return the clips that a step encodes, from its extras."""
    return msgspec.convert(extras.get(NAME, ()), tuple[NewClip, ...])


def transcription_of(extra_args: Mapping[str, Any] | None) -> str | None:
    """Return the rules that a request's tokens follow, one of TRANSCRIPTIONS; None for no rules.

    Raises ValueError if `extra_args` have another value.
    """
    given = (extra_args or {}).get(TRANSCRIPTION)
    if given is None or given in TRANSCRIPTIONS:
        return given
    raise ValueError(f"extra_args[{TRANSCRIPTION!r}] is {given!r}; allowed: {', '.join(TRANSCRIPTIONS)}")
