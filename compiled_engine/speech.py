"""Description of a speech model's encoder, whose result the decoder attends to."""

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
    num_layers: int
    num_heads: int
    head_dim: int
