"""Rotary position embedding with the scalings default, linear, llama3, yarn, longrope and dynamic.

Frequencies are computed as in transformers, so that checkpoints give the same results. With longrope and dynamic, the
frequencies also depend on the request's length, if it exceeds a border (original_max_position_embeddings).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from compiled_engine.config import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies in radians per position, fp32 [head_dim / 2] on the CPU, and the factor for cos and sin.

    For longrope and dynamic, the frequencies are those of requests of up to original_max_position_embeddings tokens.
    Raises ValueError for an unknown kind of rope, and for llama3 or yarn without original_max_position_embeddings.
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
    if rope.kind == "longrope":
        return stretched(positions_per_radian, rope.short_factor), rope.angle_scale
    return frequencies, 1.0


def stretched(positions_per_radian: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Return frequencies whose wavelengths are stretched by factors, one for each pair of elements of a head.

    Method: LongRoPE (Ding et al., 2024).
    """
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * positions_per_radian)


def dynamic_frequencies(
    lengths_T: torch.Tensor, exponents_p: torch.Tensor, theta: float, factor: float, border: int
) -> torch.Tensor:
    """Return the frequencies [T, p] of dynamic NTK scaling: theta grows with the request's length beyond `border`.

    lengths_T: int64, the request length that each token's frequencies assume, see attention.inputs.ANGLE_LENGTHS.
    exponents_p: fp32, 2 i / d for pair i of the d / 2 pairs.
    """
    dim = 2 * exponents_p.shape[0]
    stretch_T1 = factor * lengths_T.clamp(min=border)[:, None].float() / border - (factor - 1)
    return 1.0 / (theta * stretch_T1 ** (dim / (dim - 2))) ** exponents_p


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"rope type {rope.kind!r} needs original_max_position_embeddings, got None")
    return rope.original_max_position_embeddings


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Return frequencies scaled as in Llama 3.1.

    Long wavelengths are stretched by the factor, short ones are kept, and those between are blended.
    """
    original = _original_length(rope)
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, frequencies, scaled)


def _yarn(positions_per_radian: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return frequencies scaled as in YaRN (Peng et al., 2023).

    High frequencies are kept, low frequencies are divided by the factor, and those between are blended.
    positions_per_radian: the inverse of the unscaled frequencies.
    """
    original = _original_length(rope)

    def pair_with_turns(turns: float) -> float:
        """Return the index, as a fraction, of the pair of elements that rotates `turns` times in `original` tokens."""
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
    """Computes cos and sin of the rotary angles from positions in fp32, and rounds them to the model's dtype.

    It runs once per forward, for all layers.
    """

    inv_freq: torch.Tensor
    long_inv_freq: torch.Tensor  # longrope only: the frequencies of requests beyond the border
    exponents: torch.Tensor  # dynamic only, see dynamic_frequencies

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies, self.attention_factor = inverse_frequencies(rope, head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.dtype, self.rope = dtype, rope
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        if rope.kind == "longrope":
            self.register_buffer("long_inv_freq", stretched(rope.theta**exponents, rope.long_factor), persistent=False)
        elif rope.kind == "dynamic":
            self.register_buffer("exponents", exponents, persistent=False)

    def forward(
        self, positions_T: torch.Tensor, angle_lengths_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos_T1d, sin_T1d), to be broadcast over heads.

        angle_lengths_T: the request length that each token's angles assume, see attention.inputs.ANGLE_LENGTHS; None:
        no request is longer than original_max_position_embeddings. In names of tensors, p stands for the d / 2 pairs.
        """
        frequencies = self.inv_freq if angle_lengths_T is None else self.frequencies(angle_lengths_T)
        angles_Tp = positions_T[:, None].float() * frequencies
        angles_T1d = torch.cat((angles_Tp, angles_Tp), dim=-1).unsqueeze(1)
        cos_T1d = angles_T1d.cos() * self.attention_factor
        sin_T1d = angles_T1d.sin() * self.attention_factor
        return cos_T1d.to(self.dtype), sin_T1d.to(self.dtype)

    def frequencies(self, angle_lengths_T: torch.Tensor) -> torch.Tensor:
        """Return the frequencies [T, p] of T tokens, for longrope and dynamic.

        angle_lengths_T: the request length that each token's frequencies assume, see attention.inputs.ANGLE_LENGTHS.
        """
        rope, border = self.rope, _original_length(self.rope)
        if rope.kind == "dynamic":
            return dynamic_frequencies(angle_lengths_T, self.exponents, rope.theta, rope.factor, border)
        return torch.where(angle_lengths_T[:, None] > border, self.long_inv_freq, self.inv_freq)
