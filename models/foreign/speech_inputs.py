"""Declares the inputs of a speech model's encoder, and makes them from the features of clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.attention.inputs import ATTENTION_TENSORS, StepTensor, packed_inputs
from compiled_engine.speech import SpeechDescription

FEATURES = "features_CMF"
ENCODER_ARGUMENTS = (FEATURES, "attention_inputs")


def encoder_tensors(speech: SpeechDescription, dtype: torch.dtype) -> tuple[StepTensor, ...]:
    """Declare the encoder's inputs. The size "tokens" counts the clips."""
    return (StepTensor(FEATURES, ("tokens", speech.num_mel_bins, speech.num_frames), dtype), *ATTENTION_TENSORS)


def encoder_inputs(
    speech: SpeechDescription, clips: Sequence[torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the encoder's inputs for these clips, on the CPU, by the names of `encoder_tensors`.

    clips: features [num_mel_bins, num_frames] of each, in any float dtype.
    """
    features_CMF = torch.stack(list(clips)).to(dtype)
    return {FEATURES: features_CMF, **packed_inputs(len(clips), [speech.length] * len(clips))}
