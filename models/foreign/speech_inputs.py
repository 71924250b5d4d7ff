"""Declares the inputs of a speech model: for the decoder the clip of each token, for the encoder the features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_engine.attention.inputs import ATTENTION_TENSORS, StepTensor, packed_inputs, request_of_tokens
from compiled_engine.speech import SpeechDescription

FEATURES = "features_CMF"
ENCODER_ARGUMENTS = (FEATURES, "attention_inputs")


def _clip_of_tokens(step: Mapping[str, torch.Tensor], states: Any) -> torch.Tensor:
    clip_R: torch.Tensor = states.fields[CLIP][step["rows_R"].clamp(min=0).long()]
    return clip_R[request_of_tokens(step)]


# CLIP: the field of request states with the slot of the clip that a request's tokens attend to. CLIPS: this slot for
# each token of a step.
CLIP, NO_CLIP = "clip", -1
CLIPS = StepTensor("clip_T", ("tokens",), torch.int32, padding=NO_CLIP, fill=_clip_of_tokens)


def encoder_tensors(speech: SpeechDescription, dtype: torch.dtype) -> tuple[StepTensor, ...]:
    """Return declarations of the encoder's inputs. In their dimensions, the size "tokens" is the number of clips."""
    return (StepTensor(FEATURES, ("tokens", speech.num_mel_bins, speech.num_frames), dtype), *ATTENTION_TENSORS)


def encoder_inputs(speech: SpeechDescription, features_CMF: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the encoder's inputs for the features of C clips, by the names in `encoder_tensors`.

    features_CMF: [C, num_mel_bins, num_frames], on any device. The other inputs are created on the CPU.
    """
    num_clips = len(features_CMF)
    return {FEATURES: features_CMF, **packed_inputs(num_clips, [speech.length] * num_clips)}
