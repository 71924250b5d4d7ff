"""Triton kernel: stores each token's K and V at its slot of the paged cache, quantised if the cache has 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from compiled_engine.attention.triton_codes import key_offset, rounded_heads, scale_pointers, scales_of
from compiled_engine.kernels.launch_arguments import next_power_of_2
from compiled_engine.kernels.launcher import quick_launches


@quick_launches
@triton.jit(
    do_not_specialize=["k_token_stride", "v_token_stride"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def write_kv_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    v_token_stride: tl.tensor,
    K_HEAD_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Store keys and values in the cache. Program `token` stores all heads of that token; none if its slot is negative.

    k_ptr, v_ptr: [T, K, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. slot_mapping_ptr: int64 [T].
    TILE_K, TILE_D: NUM_KV_HEADS and HEAD_DIM rounded up to powers of two. DEPENDENT_LAUNCH: let the next kernel start
    early.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head_K = tl.arange(0, TILE_K)
    d_D = tl.arange(0, TILE_D)
    mask_KD = (head_K[:, None] < NUM_KV_HEADS) & (d_D[None, :] < HEAD_DIM)
    # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
    k_token_ptr = k_ptr + tl.multiple_of(token * k_token_stride, 8)
    v_token_ptr = v_ptr + tl.multiple_of(token * v_token_stride, 8)
    k_KD = tl.load(k_token_ptr + head_K[:, None] * K_HEAD_STRIDE + d_D[None, :], mask=mask_KD)
    v_KD = tl.load(v_token_ptr + head_K[:, None] * V_HEAD_STRIDE + d_D[None, :], mask=mask_KD)
    k_ptrs_KD = (
        cache_ptr
        + key_offset(slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
        + head_K[:, None] * HEAD_DIM
        + d_D[None, :]
    )
    HALF: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * WIDTH
    if cache_ptr.dtype.element_ty != k_ptr.dtype.element_ty:
        k_scale_ptr, v_scale_ptr = scale_pointers(
            scales_ptr, slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH
        )
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        k_KD = rounded_heads(tl.where(mask_KD, k_KD, 0.0), k_scale_ptr, head_K, head_K < NUM_KV_HEADS, dtype)
        v_KD = rounded_heads(tl.where(mask_KD, v_KD, 0.0), v_scale_ptr, head_K, head_K < NUM_KV_HEADS, dtype)
    tl.store(k_ptrs_KD, k_KD, mask=mask_KD)
    tl.store(k_ptrs_KD + HALF, v_KD, mask=mask_KD)


def write_kv(
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None,
    dependent_launch: bool,
) -> None:
    """Store k and v, [T, K, d] with d contiguous, at the slots of the cache, which must be contiguous.

    slot_mapping_T: int64 [T]; -1 stores nothing. kv_scales_2K: scales of an FP8 cache, see Scoring. dependent_launch:
    let the next kernel start early; only from Hopper on.
    """
    block_size, num_kv_heads, width = kv_cache_N2PKd.shape[2:]
    head_dim = k_TKd.shape[2]
    write_kv_kernel[(k_TKd.shape[0],)](
        k_TKd,
        v_TKd,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, kv_scales_2K),
        slot_mapping_T,
        k_TKd.stride(0),
        v_TKd.stride(0),
        K_HEAD_STRIDE=k_TKd.stride(1),
        V_HEAD_STRIDE=v_TKd.stride(1),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        TILE_K=next_power_of_2(num_kv_heads),
        TILE_D=next_power_of_2(head_dim),
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=max(1, min(8, next_power_of_2(num_kv_heads * head_dim) // 256)),
    )
