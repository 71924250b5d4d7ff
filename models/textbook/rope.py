"""Rotary position embedding with the scalings default, linear, llama3 and yarn.

Frequencies are computed as in transformers, so that checkpoints give the same results.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from compiled_engine.config import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per position for each of the head_dim / 2 pairs (fp32, CPU), and the factor for cos and sin.

    Raises ValueError for an unknown kind, and for llama3 or yarn without original_max_position_embeddings.
    """
    if rope.kind not in ROPE_KINDS:
        raise ValueError(f"rope kind must be one of {', '.join(ROPE_KINDS)}, got {rope.kind!r}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    positions_per_radian = rope.theta**exponents
    frequencies = 1.0 / positions_per_radian
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(positions_per_radian, rope, head_dim), rope.angle_scale
    return frequencies, 1.0


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"rope type {rope.kind!r} needs original_max_position_embeddings, got None")
    return rope.original_max_position_embeddings


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does: stretch long wavelengths by the factor, keep short ones, blend the rest."""
    original = _original_length(rope)
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, frequencies, scaled)


def _yarn(positions_per_radian: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Scale frequencies as YaRN (Peng et al., 2023).

    Those of fast pairs are kept, those of slow pairs divided by the factor, and those between blended.
    """
    original = _original_length(rope)

    def pair_with_turns(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many full turns over the original length."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * positions_per_radian) * (1 - kept) + 1.0 / positions_per_radian * kept


class RotaryEmbedding(nn.Module):
    """Computes cos and sin from positions in fp32, once per forward, and rounds them to the model's dtype."""

    inv_freq: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies, self.attention_factor = inverse_frequencies(rope, head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.dtype = dtype

    def forward(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos_T1d, sin_T1d), to be broadcast over heads. Suffix p: the d / 2 pairs."""
        angles_Tp = positions_T[:, None].float() * self.inv_freq
        angles_T1d = torch.cat((angles_Tp, angles_Tp), dim=-1).unsqueeze(1)
        cos_T1d = angles_T1d.cos() * self.attention_factor
        sin_T1d = angles_T1d.sin() * self.attention_factor
        return cos_T1d.to(self.dtype), sin_T1d.to(self.dtype)
