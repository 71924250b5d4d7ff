"""Decode MXFP4 weights while they are loaded, where the model's code needs them in its dtype.

Format: 32 values share a scale, a power of two in one byte (E8M0). Each value has four bits (E2M1); a byte holds two,
the first in the low half. OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.passes.framework.rounding import decode
from compiled_engine.quantisation import Rounding

BLOCK, BYTES = 32, 16  # values that share a scale, and their bytes
_FORMAT = Rounding("mxfp4", 1, BLOCK)


def decode_mxfp4(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Decode blocks [E, R, G, 16] and scales [E, R, G], both uint8, of E experts with R rows of G blocks.

    The values are written to `target`, [E, R, 32 G], on its device and in its dtype, one expert at a time.
    """
    for blocks, scales, out in zip(*sources, target, strict=True):
        codes, exponents = blocks.to(target.device).flatten(1), scales.to(target.device)
        out.copy_(decode(codes, exponents, _FORMAT))
