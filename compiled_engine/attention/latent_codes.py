"""Quantises rows of latent attention to 8 bits, in plain torch: the reference of all kernels that write and read them.

A latent is rounded as kv_codes.py rounds a head in int8, in FP8 too: its scale is its largest magnitude over the
largest code, in bfloat16. So neither format needs a calibration. Rotated parts are stored in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.attention.kv_codes import codes_of, decode, scales_for
from compiled_engine.kv_format import FP8_LARGEST, INT8_LARGEST, ROTATED_DTYPE, SCALE_DTYPE, head_dim_of


class CodedRows(NamedTuple):
    """Rows in 8 bits: codes of latents as bytes [..., r], rotated parts [..., p], and scales of latents [...]."""

    codes: torch.Tensor
    rotated: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, dtype: torch.dtype, latent_dim: int) -> CodedRows:
        """Return rows [..., r + p], in any float dtype, quantised for a cache of this dtype."""
        latents, rotated = rows.tensor_split((latent_dim,), -1)
        latents = latents.float()
        scales = scales_for(latents, INT8_LARGEST if dtype == torch.uint8 else FP8_LARGEST)
        return cls(codes_of(latents, scales.float(), dtype), rotated.to(ROTATED_DTYPE), scales)

    @classmethod
    def planes(cls, cache_N1P1w: torch.Tensor, latent_dim: int) -> CodedRows:
        """Return views of an 8-bit cache: codes [N, P, r], rotated parts [N, P, p] and scales [N, P]."""
        num_blocks, _, block_size, _, _ = cache_N1P1w.shape
        rotated_dim = head_dim_of(cache_N1P1w, latent_dim) - latent_dim
        sizes = latent_dim, rotated_dim * ROTATED_DTYPE.itemsize, SCALE_DTYPE.itemsize
        bytes_NW = cache_N1P1w.view(torch.uint8).view(num_blocks, -1)
        codes, rotated, scales = bytes_NW.split([block_size * size for size in sizes], 1)
        return cls(
            codes.unflatten(1, (block_size, latent_dim)),
            rotated.view(ROTATED_DTYPE).unflatten(1, (block_size, rotated_dim)),
            scales.view(SCALE_DTYPE),
        )

    def decoded(self, coded_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        """Return rows [..., r + p] in `dtype`. coded_dtype: that of the cache from which they are."""
        latents = decode(self.codes, self.scales, coded_dtype)
        return torch.cat((latents.to(dtype), self.rotated.to(dtype)), -1)
