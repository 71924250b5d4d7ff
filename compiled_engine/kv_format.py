"""Formats of the KV cache: the dtype of stored keys and values, and the layout of a block.

A block has two halves, for keys and for values. Without scales a half is [P, K, d]: P slots for tokens, K heads, d
elements of a head. With scales it holds all quantised values of the half, [P, K, d], then one scale per head of each
token, [P, K]. In both cases the cache is a contiguous tensor [N, 2, P, K, w] of N blocks, where w counts the elements
of a token's head, its scale included. Quantised values of 8 bits are called codes.

With latent attention a block has one half, of rows instead of heads: [P, 1, w], a latent of r elements and a rotated
part of p elements for each token. In 8 bits it holds the codes of all latents, [P, r], then the rotated parts as they
are, [P, p] in bfloat16, then a scale for each latent, [P].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

AUTO = "auto"
INT8 = "int8"
FP8 = "fp8_e4m3"
# Scales of int8: bfloat16 has fp32's exponent range, so no key or value is too small or too large for its scale.
SCALE_DTYPE = torch.bfloat16
# Rotated parts beside 8-bit latents. They keep 16 bits, because one of them is a part of the scores of all heads.
ROTATED_DTYPE = torch.bfloat16
# An int8 code is stored as a byte with this offset, which makes it the low byte of an exact half-precision number.
INT8_BIAS = 128
INT8_LARGEST = 127
# The smallest scale of a head, also used for heads of zeros. Kernels rely on it: they take logarithms of scales.
LEAST_SCALE = 2.0**-40
FP8_LARGEST = 448.0


class Elements(NamedTuple):
    """An 8-bit format of keys and values in the cache."""

    name: str
    dtype: torch.dtype
    scale_width: int = 0  # elements that the scale of a token's head takes; 0: no scale


CODED = (Elements(INT8, torch.uint8, SCALE_DTYPE.itemsize), Elements(FP8, torch.float8_e4m3fn))
# Names of the formats by option value, including vLLM's.
BY_OPTION = {AUTO: AUTO, INT8: INT8, "int8_per_token_head": INT8, "fp8": FP8, FP8: FP8}
_BY_NAME = {elements.name: elements for elements in CODED}
_SCALE_WIDTHS = {elements.dtype: elements.scale_width for elements in CODED}


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache's tensors. name: "auto" for the model's dtype, or the name of an 8-bit format."""
    return model_dtype if name == AUTO else _BY_NAME[name].dtype


def is_coded(dtype: torch.dtype) -> bool:
    """Return whether a cache of this dtype holds 8-bit quantised values."""
    return dtype in _SCALE_WIDTHS


def has_scales(dtype: torch.dtype) -> bool:
    """Return whether a cache of keys and values of this dtype holds a scale for each head of each token."""
    return _SCALE_WIDTHS.get(dtype, 0) > 0


def head_width(dtype: torch.dtype, head_dim: int, latent_dim: int = 0) -> int:
    """Return the number of elements that one head of a token takes in a cache of this dtype, its scale included.

    latent_dim: elements of the latent in a row of head_dim elements; 0 without latent attention.
    """
    if latent_dim and is_coded(dtype):
        return latent_dim + (head_dim - latent_dim) * ROTATED_DTYPE.itemsize + SCALE_DTYPE.itemsize
    return head_dim + _SCALE_WIDTHS.get(dtype, 0)


def halves_of(latent_dim: int) -> int:
    """Return the size of a cache's dimension 1: 2 for keys and values, 1 for latent attention, whose rows are both.

    latent_dim: 0 without latent attention.
    """
    return 1 if latent_dim else 2


def head_dim_of(cache: torch.Tensor, latent_dim: int = 0) -> int:
    """Return the number of elements of a head in a cache [N, 2, P, K, w], without its scale.

    latent_dim: see head_width; the result is then the number of elements of a row of latent attention.
    """
    width = cache.shape[-1]
    if latent_dim and is_coded(cache.dtype):
        return latent_dim + (width - latent_dim - SCALE_DTYPE.itemsize) // ROTATED_DTYPE.itemsize
    return width - _SCALE_WIDTHS.get(cache.dtype, 0)
