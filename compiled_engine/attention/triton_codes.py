"""Device functions of Triton kernels that write or read a KV cache: addresses of keys and scales, 8-bit codes.

A code is a quantised value of 8 bits. Kernels are specialised on the dtype of the cache and on WIDTH, the number of
elements per head and token in it: HEAD_DIM, or more if the cache has scales, see compiled_engine/kv_format.py. Codes
are rounded as in kv_codes.py; rounding is written out, since Triton's interpreter rounds bfloat16 and e4m3 differently.

scales_ptr is the cache itself as int16 (bits of bfloat16) for an int8 cache, kv_scales_2K or ones for an FP8 cache, and
None for any other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine import kv_format

INT8_BIAS = tl.constexpr(float(kv_format.INT8_BIAS))
INT8_LARGEST = tl.constexpr(float(kv_format.INT8_LARGEST))
LEAST_SCALE = tl.constexpr(kv_format.LEAST_SCALE)
# The bits of 1 in bfloat16.
ONE_SCALE = tl.constexpr(0x3F80)
FP8_LARGEST = tl.constexpr(kv_format.FP8_LARGEST)


def scales_of(kv_cache_N2PKd: torch.Tensor, kv_scales_2K: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor that kernels take as scales_ptr.

    The cache itself, as int16, if its format stores scales beside codes; otherwise kv_scales_2K, if there are any. An
    FP8 cache without scales has ones, and a cache that is not quantised None.
    """
    if kv_format.has_scales(kv_cache_N2PKd.dtype):
        return kv_cache_N2PKd.view(torch.int16)
    if kv_scales_2K is None and kv_format.is_coded(kv_cache_N2PKd.dtype):
        return torch.ones(2, kv_cache_N2PKd.shape[3], device=kv_cache_N2PKd.device)
    return kv_scales_2K


@triton.jit
def row_of(block: tl.tensor, key: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Return the row of a key in a cache without scales, viewed as [N * 2 * P, K * d]; the value is P rows further.

    key: the key's position in its request, or its slot. The result is int64, since a cache may hold more than 2**31
    elements.
    """
    return block.to(tl.int64) * (2 * BLOCK_SIZE) + key % BLOCK_SIZE


@triton.jit
def key_offset(
    block: tl.tensor,
    key: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the offset of a key's first head in the cache, in elements. key: see row_of.

    The value that belongs to the key is BLOCK_SIZE * NUM_KV_HEADS * WIDTH elements further.
    """
    if WIDTH == HEAD_DIM:
        return row_of(block, key, BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
    else:
        half = block.to(tl.int64) * (2 * BLOCK_SIZE * NUM_KV_HEADS * WIDTH)
        return half + key % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)


@triton.jit
def scale_offset(
    block: tl.tensor,
    key: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the offset from scales_ptr of the scale of a key's first head, in scales. key: see row_of.

    The scale of the key's value is BLOCK_SIZE * NUM_KV_HEADS * WIDTH // 2 scales further.
    """
    half = block.to(tl.int64) * (BLOCK_SIZE * NUM_KV_HEADS * WIDTH)
    return half + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 2 + key % BLOCK_SIZE * NUM_KV_HEADS


@triton.jit
def load_scales(
    head_scales_ptr: tl.tensor,
    block_N: tl.tensor,
    keys_N: tl.tensor,
    stored_N: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (scales of keys, scales of their values), fp32 [N].

    In an int8 cache they are 1 where nothing is stored. head_scales_ptr: scales_ptr from the K/V head on.
    """
    if WIDTH != HEAD_DIM:
        offsets_N = scale_offset(block_N, keys_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
        v_offsets_N = offsets_N + BLOCK_SIZE * NUM_KV_HEADS * WIDTH // 2
        k_scale_N = bfloat16_values(tl.load(head_scales_ptr + offsets_N, mask=stored_N, other=ONE_SCALE))
        v_scale_N = bfloat16_values(tl.load(head_scales_ptr + v_offsets_N, mask=stored_N, other=ONE_SCALE))
    else:
        ones_N = tl.where(stored_N, 1.0, 1.0)
        k_scale_N = ones_N * tl.load(head_scales_ptr)
        v_scale_N = ones_N * tl.load(head_scales_ptr + NUM_KV_HEADS)
    return k_scale_N, v_scale_N


@triton.jit
def product_type(x: tl.tensor, element: tl.constexpr) -> tl.tensor:
    """Convert queries x to the type in which they are multiplied by elements of the cache. element: the cache's type.

    For 8-bit codes, bfloat16 queries become float16, since one or two instructions convert the codes to float16
    exactly.
    """
    if x.dtype == tl.bfloat16 and element != tl.bfloat16:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def numbers(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return elements of a cache as numbers of type dtype, without applying scales.

    codes: keys or values as stored. An int8 cache has bytes with a bias, which is subtracted.
    """
    if codes.dtype == tl.uint8 and dtype == tl.float16:
        # 0x6400 is 1024 in float16; its lowest byte holds the code.
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024 + INT8_BIAS)
    elif codes.dtype == tl.uint8:
        return codes.to(dtype) - INT8_BIAS
    else:
        return codes.to(dtype)


@triton.jit
def bfloat16_bits(x: tl.tensor) -> tl.tensor:
    """Return finite numbers rounded to bfloat16, ties to even, as bits in int16."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def bfloat16_values(bits: tl.tensor) -> tl.tensor:
    """Return the fp32 values of bfloat16 numbers that are given as bits in int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def stored_scale(largest: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the scales with which values up to `largest` are rounded to codes of this type, as bits of bfloat16."""
    if dtype == tl.uint8:
        return bfloat16_bits(tl.maximum(tl.div_rn(largest, INT8_LARGEST), LEAST_SCALE))
    else:
        return bfloat16_bits(tl.maximum(tl.div_rn(largest, FP8_LARGEST), LEAST_SCALE))


@triton.jit
def fp8_codes(x: tl.tensor) -> tl.tensor:
    """Return the bytes of fp32 values clamped to e4m3's range and rounded to it, ties to even."""
    size = tl.minimum(tl.abs(x), FP8_LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Multiples of 2**-9 below 2**-6: adding 2**23 rounds to an integer.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(size < 0.015625, small, normal) | tl.where(x < 0, 0x80, 0)


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the codes of fp32 values for a cache of this type.

    scale: fp32, of the shape of x or broadcast to it; None, for FP8 only: 1.
    """
    if dtype == tl.uint8:
        code = tl.floor(tl.div_rn(x, scale) + (INT8_BIAS + 0.5))
        code = tl.minimum(tl.maximum(code, INT8_BIAS - INT8_LARGEST), INT8_BIAS + INT8_LARGEST)
        return code.to(tl.int32).to(tl.uint8)
    else:
        if scale is not None:
            x = tl.div_rn(x, scale)
        return fp8_codes(x).to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def scale_pointers(
    scales_ptr: tl.tensor,
    block: tl.tensor,
    key: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers to the scales of a key's first head and of its value's first head. key: see row_of."""
    if WIDTH != HEAD_DIM:
        k_scale_ptr = scales_ptr + scale_offset(block, key, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
        return k_scale_ptr, k_scale_ptr + BLOCK_SIZE * NUM_KV_HEADS * WIDTH // 2
    else:
        return scales_ptr, scales_ptr + NUM_KV_HEADS


@triton.jit
def rounded_heads(
    x_HD: tl.tensor, scale_ptr: tl.tensor, head_H: tl.tensor, mask_H: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Return the codes of heads [H, D] for a cache of this type, and store their scales if they are int8.

    x_HD: zeros beyond the end of a head. scale_ptr: a result of scale_pointers.
    """
    x_HD = x_HD.to(tl.float32)
    if dtype == tl.uint8:
        scale_H = stored_scale(tl.max(tl.abs(x_HD), 1), dtype)
        tl.store(scale_ptr + head_H, scale_H, mask=mask_H)
        return codes_of(x_HD, bfloat16_values(scale_H)[:, None], dtype)
    else:
        return codes_of(x_HD, tl.load(scale_ptr + head_H, mask=mask_H, other=1.0)[:, None], dtype)


@triton.jit
def rounded_head(x_D: tl.tensor, scale_ptr: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (codes [D] of one head, their scale), and store the scale if the cache is int8. See rounded_heads."""
    x_D = x_D.to(tl.float32)
    if dtype == tl.uint8:
        stored = stored_scale(tl.max(tl.abs(x_D), 0), dtype)
        tl.store(scale_ptr, stored)
        scale = bfloat16_values(stored)
        return codes_of(x_D, scale, dtype), scale
    else:
        scale = tl.load(scale_ptr)
        return codes_of(x_D, scale, dtype), scale
