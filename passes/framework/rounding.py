"""Quantisation to 8-bit codes with scales and back: the formula that loader, references and kernels share.

A tile's scale, in fp32, is its largest magnitude over the element type's largest value; a code is the value over its
scale, rounded. A tile of zeros has a small scale, never zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compiled_engine.quantisation import LinearScheme, Rounding

SMALLEST_MAXIMUM = 2.0**-24


def scales_of(values_NK: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the scales [R, C] in fp32, one per tile."""
    N, K = values_NK.shape
    rows, columns = rounding.rows or N, rounding.columns or K
    magnitudes = F.pad(values_NK.float().abs(), (0, -K % columns, 0, -N % rows))
    largest_RC = magnitudes.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    # Divide by a tensor: for a Python number, PyTorch on CUDA multiplies by the reciprocal, which rounds twice.
    return largest_RC.clamp_min(SMALLEST_MAXIMUM) / torch.full_like(largest_RC, rounding.largest)


def codes_of(values_NK: torch.Tensor, scales_RC: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Quantise values [N, K] to codes [N, K]; out-of-range values are clamped."""
    scaled_NK = values_NK.float() / spread(scales_RC, rounding, *values_NK.shape)
    return scaled_NK.clamp(-rounding.largest, rounding.largest).to(rounding.dtype)


def decode(codes_NK: torch.Tensor, scales_RC: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Dequantise codes to fp32 values [N, K]."""
    return codes_NK.float() * spread(scales_RC, rounding, *codes_NK.shape)


def spread(scales_RC: torch.Tensor, rounding: Rounding, num_rows: int, num_columns: int) -> torch.Tensor:
    """Repeat the scales to [num_rows, num_columns]; a dimension with one scale stays 1."""
    for dim, size, tile in ((0, num_rows, rounding.rows), (1, num_columns, rounding.columns)):
        if tile > 1 and scales_RC.shape[dim] > 1:
            scales_RC = scales_RC.repeat_interleave(tile, dim).narrow(dim, 0, size)
    return scales_RC


def retile(scales: torch.Tensor, stored: Rounding, kept: Rounding, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return the scales for smaller tiles, each within one stored tile; values do not change."""
    scales_RC = scales.reshape(stored.grid(num_rows, num_columns))
    for dim, size in ((0, num_rows), (1, num_columns)):
        old, new = ((stored.rows, kept.rows), (stored.columns, kept.columns))[dim]
        count = -(-size // new) if new else 1
        if old != new:
            scales_RC = scales_RC.repeat_interleave((old or size) // new, dim).narrow(dim, 0, count)
    return scales_RC


def round_inputs(
    x_TK: torch.Tensor, rounding: Rounding, static_1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a linear's inputs: codes [T, K] and scales [T, C], or [1, 1] for a static scale."""
    scales = static_1.view(1, 1) if static_1 is not None else scales_of(x_TK, rounding)
    return codes_of(x_TK, scales, rounding), scales


def weight_codes(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the codes of a weight [N, K], or [E, N, K] of whole tiles, that is quantised while loading."""
    rounding, weight_NK = LinearScheme.parse(scheme).weight, weight.flatten(0, -2)
    return codes_of(weight_NK, scales_of(weight_NK, rounding), rounding).view(weight.shape)


def weight_scales(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the scales [R, C], or [E, R, C], of a weight that is quantised while loading."""
    scales_RC = scales_of(weight.flatten(0, -2), LinearScheme.parse(scheme).weight)
    return scales_RC.unflatten(0, (*weight.shape[:-2], -1))


def the_same(values_S: torch.Tensor, names: str) -> torch.Tensor:
    """Return the common value of input scales, [1]. Raises ValueError if they differ. names: their linears."""
    if (values_S != values_S[0]).any():
        raise ValueError(
            f"the scales of the inputs of {names} are {values_S.tolist()}; they can be merged where these are the same:"
            " start with disable_passes=('merge_linears',)"
        )
    return values_S[:1]
