"""Quantises keys and values to 8 bits, in plain torch: the reference of all kernels that write and read them.

A code is a quantised value. int8: each head of a token has a scale, its largest magnitude over 127 in bfloat16; values
are divided by it and rounded to the nearest, halves up. This needs no calibration, like vLLM's int8_per_token_head.
FP8: values are divided by a scale that does not depend on the token, and rounded to the nearest e4m3, with saturation.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.kv_format import (
    FP8_LARGEST,
    INT8_BIAS,
    INT8_LARGEST,
    LEAST_SCALE,
    SCALE_DTYPE,
    has_scales,
    head_dim_of,
    is_coded,
)

# The first compute capability that converts e4m3, so that kernels can read and write it.
E4M3_CAPABILITY = (8, 9)


@cache
def kernels_convert(cache_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels on this GPU can convert elements of this cache dtype. Otherwise torch's ops must do so."""
    return cache_dtype != torch.float8_e4m3fn or torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY


def planes(kv_cache_N2PKd: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of an 8-bit cache: codes as bytes, [2N, P, K, d], and scales, [2N, P, K], if it has any.

    Index 2n of the first dimension has the keys of block n, index 2n + 1 its values.
    """
    num_blocks, _, block_size, num_kv_heads, _ = kv_cache_N2PKd.shape
    head_dim = head_dim_of(kv_cache_N2PKd)
    halves_MW = kv_cache_N2PKd.view(torch.uint8).view(2 * num_blocks, -1)
    codes = block_size * num_kv_heads * head_dim
    codes_MPKd = halves_MW[:, :codes].unflatten(1, (block_size, num_kv_heads, head_dim))
    if not has_scales(kv_cache_N2PKd.dtype):
        return (codes_MPKd,)
    return codes_MPKd, halves_MW[:, codes:].view(SCALE_DTYPE).unflatten(1, (block_size, num_kv_heads))


def encode(values_TKd: torch.Tensor, dtype: torch.dtype, scale_K: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Quantise values for a cache of this dtype. Returns (codes as bytes [T, K, d],), and for int8 also scales [T, K].

    scale_K: scales of an FP8 cache, fp32; None: 1.
    """
    values_TKd = values_TKd.float()
    if has_scales(dtype):
        scales_TK = scales_for(values_TKd, INT8_LARGEST)
        return codes_of(values_TKd, scales_TK.float(), dtype), scales_TK
    return (codes_of(values_TKd, scale_K, dtype),)


def scales_for(values: torch.Tensor, largest_code: float) -> torch.Tensor:
    """Return the scales [...] with which the largest magnitude of fp32 values [..., d] gets the largest code."""
    return (values.abs().amax(-1) / largest_code).clamp(min=LEAST_SCALE).to(SCALE_DTYPE)


def codes_of(values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes, as bytes, of fp32 values [..., d] for a cache of this dtype. scales: fp32 [...]; None: 1."""
    if scales is not None:
        values = values / scales.unsqueeze(-1)
    if dtype == torch.uint8:
        codes = (values + (INT8_BIAS + 0.5)).floor()
        return codes.clamp(INT8_BIAS - INT8_LARGEST, INT8_BIAS + INT8_LARGEST).to(dtype)
    return values.clamp(-FP8_LARGEST, FP8_LARGEST).to(dtype).view(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return codes dequantised to fp32. codes: bytes of a cache of this dtype [..., d]; scales: [...], None: 1."""
    values = codes.float() - INT8_BIAS if has_scales(dtype) else codes.view(dtype).float()
    return values if scales is None else values * scales.float().unsqueeze(-1)


def decoded(
    kv_cache_N2PKd: torch.Tensor, block_table_RB: torch.Tensor, length: int, kv_scales_2K: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a dequantised cache and its block table, for the first `length` positions of each request.

    An 8-bit cache is replaced by an fp32 cache with only the requests' blocks, [R * B, 2, P, K, d]. Any other cache is
    returned unchanged.
    """
    if not is_coded(kv_cache_N2PKd.dtype):
        return kv_cache_N2PKd, block_table_RB
    block_size, num_kv_heads = kv_cache_N2PKd.shape[2:4]
    table_RB = block_table_RB[:, : max(1, -(-length // block_size))]
    halves_M = (2 * table_RB.reshape(-1, 1).long() + torch.arange(2, device=table_RB.device)).view(-1)
    codes, *scales = (plane.index_select(0, halves_M) for plane in planes(kv_cache_N2PKd))
    scales_MPK = scales[0] if scales else None
    if scales_MPK is None and kv_scales_2K is not None:
        scales_MPK = kv_scales_2K.repeat(table_RB.numel(), 1).unsqueeze(1).expand(-1, block_size, -1)
    values_MPKd = decode(codes, scales_MPK, kv_cache_N2PKd.dtype)
    values_B2PKd = values_MPKd.view(-1, 2, block_size, num_kv_heads, values_MPKd.shape[-1])
    blocks_RB = torch.arange(table_RB.numel(), dtype=torch.int32, device=table_RB.device)
    return values_B2PKd, blocks_RB.view(table_RB.shape)


def scale_of(kv_scales_2K: torch.Tensor | None, half: int) -> torch.Tensor | None:
    """Return the scales [K] of keys (half 0) or values (half 1); None if there are none."""
    return None if kv_scales_2K is None else kv_scales_2K[half]
