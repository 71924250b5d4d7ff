"""Decode MXFP4 weights while they are loaded.

Format: 32 values share a scale, a power of two in one byte (E8M0). Each value has four bits (E2M1); a byte holds two,
the first in the low half. OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Non-negative E2M1 values, by code.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NOT_A_NUMBER = 127, 255
BYTES = 16  # of a block: 32 values that share a scale


def decode_mxfp4(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Decode blocks [E, R, G, 16] and scales [E, R, G], both uint8, into a tensor [E, R, 32 G], on its device and in
    its dtype, one index of E at a time."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=target.device)
    for blocks, scales, out in zip(*sources, target, strict=True):
        packed = blocks.to(target.device)
        exponents = scales.to(target.device).to(torch.float32)
        factors = torch.where(exponents == _NOT_A_NUMBER, torch.nan, torch.exp2(exponents - _BIAS))
        values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1).flatten(-2)
        out.copy_((values * factors.unsqueeze(-1)).flatten(-2))
