"""Rows of latent attention in Triton kernels: the addresses of their parts in a cache, and the kernel that stores them.

A row has a latent of LATENT elements and a rotated part of ROTATED elements. See kv_format.py for the layout of a
block, and latent_codes.py for rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_engine.attention.triton_codes import bfloat16_bits, bfloat16_values, codes_of, stored_scale
from compiled_engine.kernels.launch_arguments import next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.kv_format import is_coded


class LatentCache(NamedTuple):
    """A cache of latent rows, [N, 1, P, 1, w]: an argument of device functions.

    Construct it in the argument list of a call: if it is assigned to a variable, Triton turns its sizes into tensors.
    """

    ptr: tl.tensor
    words_ptr: tl.tensor | None  # an 8-bit cache as int16, bits of bfloat16; None for any other cache
    BLOCK_SIZE: tl.constexpr
    LATENT: tl.constexpr
    ROTATED: tl.constexpr


def words_of(cache_N1P1w: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that kernels take as words_ptr: an 8-bit cache as int16; None for any other cache."""
    return cache_N1P1w.view(torch.int16) if is_coded(cache_N1P1w.dtype) else None


@triton.jit
def row_ptrs(cache: LatentCache, block: tl.tensor, key: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers to the latents and to the rotated parts of keys. The latter are words in an 8-bit cache.

    block: the block of each key. key: positions in a request, or slots.
    """
    place = key % cache.BLOCK_SIZE
    if cache.words_ptr is None:
        slot = block.to(tl.int64) * cache.BLOCK_SIZE + place
        row_ptr = cache.ptr + tl.multiple_of(slot * (cache.LATENT + cache.ROTATED), 8)
        return row_ptr, row_ptr + cache.LATENT
    else:
        start = block.to(tl.int64) * (cache.BLOCK_SIZE * (cache.LATENT + 2 * cache.ROTATED + 2))
        rotated = start // 2 + cache.BLOCK_SIZE * cache.LATENT // 2 + place * cache.ROTATED
        return cache.ptr + start + place * cache.LATENT, cache.words_ptr + rotated


@triton.jit
def latent_scale_ptrs(cache: LatentCache, block: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return pointers to the scales of the latents of keys, words of an 8-bit cache. block, key: see row_ptrs."""
    start = block.to(tl.int64) * (cache.BLOCK_SIZE * (cache.LATENT + 2 * cache.ROTATED + 2) // 2)
    return cache.words_ptr + start + cache.BLOCK_SIZE * (cache.LATENT + 2 * cache.ROTATED) // 2 + key % cache.BLOCK_SIZE


@triton.jit
def rotated_numbers(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return loaded rotated parts as numbers of type dtype. x: elements of the cache, or words of an 8-bit cache."""
    if x.dtype == tl.int16 and dtype == tl.bfloat16:
        return x.to(tl.bfloat16, bitcast=True)
    elif x.dtype == tl.int16:
        return bfloat16_values(x).to(dtype)
    else:
        return x.to(dtype)


@quick_launches
@triton.jit(do_not_specialize=["row_token_stride"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def write_latents_kernel(
    row_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    words_ptr: tl.tensor | None,
    slot_mapping_ptr: tl.tensor,
    row_token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
) -> None:
    """Store rows in the cache. Program `token` stores that token's row; nothing if its slot is negative.

    row_ptr: [T, 1, LATENT + ROTATED]. cache_ptr, words_ptr: see LatentCache. slot_mapping_ptr: int64 [T]. TILE_R,
    TILE_P: LATENT and ROTATED, rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    r_R = tl.arange(0, TILE_R)
    p_P = tl.arange(0, TILE_P)
    token_ptr = row_ptr + tl.multiple_of(token * row_token_stride, 8)
    latent_R = tl.load(token_ptr + r_R, mask=r_R < LATENT, other=0.0)
    rotated_P = tl.load(token_ptr + LATENT + p_P, mask=p_P < ROTATED)
    if words_ptr is not None:
        element: tl.constexpr = cache_ptr.dtype.element_ty
        latent_R = latent_R.to(tl.float32)
        stored = stored_scale(tl.max(tl.abs(latent_R), 0), element)
        scale_ptr = latent_scale_ptrs(LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block, slot)
        tl.store(scale_ptr, stored)
        latent_R = codes_of(latent_R, bfloat16_values(stored), element)
        rotated_P = bfloat16_bits(rotated_P)
    latent_ptr, rotated_ptr = row_ptrs(LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block, slot)
    tl.store(latent_ptr + r_R, latent_R, mask=r_R < LATENT)
    tl.store(rotated_ptr + p_P, rotated_P, mask=p_P < ROTATED)


def write_latents(
    row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor, latent_dim: int
) -> None:
    """Store rows, [T, 1, w] with w contiguous, at the slots of the cache. slot_mapping_T: int64; -1 stores nothing."""
    num_tokens, _, width = row_T1w.shape
    write_latents_kernel[(num_tokens,)](
        row_T1w,
        cache_N1P1w,
        words_of(cache_N1P1w),
        slot_mapping_T,
        row_T1w.stride(0),
        BLOCK_SIZE=cache_N1P1w.shape[2],
        LATENT=latent_dim,
        ROTATED=width - latent_dim,
        TILE_R=next_power_of_2(latent_dim),
        TILE_P=next_power_of_2(width - latent_dim),
        num_warps=2,
    )
