"""A speech model's encoder, whose result the decoder attends to, and how audio is given to it: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeechDescription:
    """The encoder of a speech model. It encodes clips of a fixed length.

    A clip's features are [num_mel_bins, num_frames]; its encoding is [length, hidden size of the model].
    """

    num_mel_bins: int
    num_frames: int
    length: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class SpeechConfig:
    """The audio of prompts: how clips are read, and limits of their keys and values on the device."""

    num_slots: int  # clips whose keys and values are on the device; each running request holds one
    step_clips: int  # most clips that a step encodes
    encoder_backend: str  # attention backend of the encoder
    num_workers: int  # processes that compute features
    cache_bytes: int  # features kept in each process that takes requests
