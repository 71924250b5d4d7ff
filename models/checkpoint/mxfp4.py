"""Weights that a checkpoint holds in MXFP4, decoded while they are loaded.

The format: 32 values share a scale, a power of two in a byte (E8M0), and are four bits each (E2M1), two in a byte, the
first in the low half. OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of a sign, two bits of exponent, and one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NOT_A_NUMBER = 127, 255
BYTES = 16  # of the values that share a scale


@dataclass(frozen=True)
class Mxfp4Tensor:
    """[E, R, 32 G] as blocks [E, R, G, 16] and scales [E, R, G], both of uint8."""

    blocks: torch.Tensor
    scales: torch.Tensor

    def decode_into(self, target: torch.Tensor) -> None:
        """Write the values into a tensor of their shape, on its device and in its dtype, one of E after another."""
        table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=target.device)
        for blocks, scales, out in zip(self.blocks, self.scales, target, strict=True):
            packed = blocks.to(target.device)
            exponents = scales.to(target.device).to(torch.float32)
            factors = torch.where(exponents == _NOT_A_NUMBER, torch.nan, torch.exp2(exponents - _BIAS))
            values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1).flatten(-2)
            out.copy_((values * factors.unsqueeze(-1)).flatten(-2))
