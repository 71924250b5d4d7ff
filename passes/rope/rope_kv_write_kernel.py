"""Triton kernel that norms and rotates the heads of q and k, and writes k and v to the paged cache.

It rounds where textbook code rounds: after the norm, after the multiplication by its weight, after each product with
cos and sin, and after their sum. Results equal those of the unfused ops, except that the norm may add squares in
another order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.inputs import Rotation
from compiled_engine.attention.triton_codes import key_offset, scale_pointers, scales_of
from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2, require_dense
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.rope.rope_steps import load_pairs, normed_and_rotated, places, rounded_pairs, store_pairs

# A thread holds 16 bytes of each half of a head in half precision; a program has up to four warps of such threads.
ELEMENTS_PER_WARP = 32 * 16
MAX_WARPS = 4


@quick_launches
@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride", "cos_stride", "sin_stride"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def rope_kv_write_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    STRIDE_MULTIPLE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_P: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OF_PAIRS: tl.constexpr,
    ROPE_WIDE: tl.constexpr,
    NORM_LAST: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Norm and rotate q and k, write q to `out`, and store k and v in the cache; see rope_kv_write.

    Program (token, tile of TILE_H heads of q, or of k and v), with all tiles of a token one after another.

    q_ptr: [T, H, d]; k_ptr, v_ptr: [T, K, d]. q_stride, k_stride, v_stride: elements from token to token;
        Q_HEAD_STRIDE, ...: from head to head. out_ptr: [T, H, d], contiguous.
    q_weight_ptr, k_weight_ptr: [d], or None without norms; cos_ptr, sin_ptr: [T, ROTARY], or with OF_PAIRS, a value per
        pair of elements that are rotated together, [T, ROTARY / 2].
    cache_ptr: [N, 2, BLOCK_SIZE, K, WIDTH]; scales_ptr: see triton_codes.scales_of; slot_mapping_ptr: int64 [T]; for a
        negative slot, nothing is stored.
    TILE_P: pairs of a head, rounded up to a power of two. STRIDE_MULTIPLE: a divisor of all token strides.
    OFFSET, WIDE, ROTARY, INTERLEAVED, ROPE_WIDE, NORM_LAST: norm_offset, norm_wide, rotary_dim, interleaved, wide and
        norm_last of Rotation.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_TILES: tl.constexpr = (NUM_HEADS + TILE_H - 1) // TILE_H
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + TILE_H - 1) // TILE_H
    # Neighbouring programs share a token, so that memory is read in order.
    token = (tl.program_id(0) // (Q_TILES + KV_TILES)).to(tl.int64)
    tile = tl.program_id(0) % (Q_TILES + KV_TILES)
    cos_ptr += tl.multiple_of(token * cos_stride, STRIDE_MULTIPLE)
    sin_ptr += tl.multiple_of(token * sin_stride, STRIDE_MULTIPLE)
    pair_HP = tl.broadcast_to(tl.arange(0, TILE_P)[None, :], (TILE_H, TILE_P))
    one_HP, other_HP = places(pair_HP, HEAD_DIM, ROTARY, INTERLEAVED)
    if tile < Q_TILES:
        head_H1 = tile * TILE_H + tl.arange(0, TILE_H)[:, None]
        mask_HP = (head_H1 < NUM_HEADS) & (pair_HP < HALF)
        q_ptr += tl.multiple_of(token * q_stride, STRIDE_MULTIPLE)
        one_q_HP, other_q_HP = normed_and_rotated(
            q_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            head_H1 * Q_HEAD_STRIDE,
            pair_HP,
            mask_HP,
            eps,
            HEAD_DIM,
            OFFSET,
            WIDE,
            ROTARY,
            INTERLEAVED,
            OF_PAIRS,
            ROPE_WIDE,
            NORM_LAST,
        )
        out_ptr += token * (NUM_HEADS * HEAD_DIM)
        store_pairs(out_ptr, head_H1 * HEAD_DIM, one_HP, other_HP, mask_HP, one_q_HP, other_q_HP)
    else:
        head_H1 = (tile - Q_TILES) * TILE_H + tl.arange(0, TILE_H)[:, None]
        mask_HP = (head_H1 < NUM_KV_HEADS) & (pair_HP < HALF)
        slot = tl.load(slot_mapping_ptr + token)
        k_ptr += tl.multiple_of(token * k_stride, STRIDE_MULTIPLE)
        v_ptr += tl.multiple_of(token * v_stride, STRIDE_MULTIPLE)
        one_v_HP, other_v_HP = load_pairs(v_ptr, head_H1 * V_HEAD_STRIDE, one_HP, other_HP, mask_HP)
        one_k_HP, other_k_HP = normed_and_rotated(
            k_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            head_H1 * K_HEAD_STRIDE,
            pair_HP,
            mask_HP,
            eps,
            HEAD_DIM,
            OFFSET,
            WIDE,
            ROTARY,
            INTERLEAVED,
            OF_PAIRS,
            ROPE_WIDE,
            NORM_LAST,
        )
        if slot >= 0:
            cache_ptr += key_offset(slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
            HALF_BLOCK: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * WIDTH
            if cache_ptr.dtype.element_ty != k_ptr.dtype.element_ty:
                dtype: tl.constexpr = cache_ptr.dtype.element_ty
                k_scale_ptr, v_scale_ptr = scale_pointers(
                    scales_ptr, slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH
                )
                mask_H1 = head_H1 < NUM_KV_HEADS
                one_k_codes_HP, other_k_codes_HP = rounded_pairs(
                    one_k_HP, other_k_HP, mask_HP, k_scale_ptr, head_H1, mask_H1, dtype
                )
                store_pairs(cache_ptr, head_H1 * HEAD_DIM, one_HP, other_HP, mask_HP, one_k_codes_HP, other_k_codes_HP)
                one_v_codes_HP, other_v_codes_HP = rounded_pairs(
                    one_v_HP, other_v_HP, mask_HP, v_scale_ptr, head_H1, mask_H1, dtype
                )
                cache_ptr += HALF_BLOCK
                store_pairs(cache_ptr, head_H1 * HEAD_DIM, one_HP, other_HP, mask_HP, one_v_codes_HP, other_v_codes_HP)
            else:
                store_pairs(cache_ptr, head_H1 * HEAD_DIM, one_HP, other_HP, mask_HP, one_k_HP, other_k_HP)
                cache_ptr += HALF_BLOCK
                store_pairs(cache_ptr, head_H1 * HEAD_DIM, one_HP, other_HP, mask_HP, one_v_HP, other_v_HP)


def launch(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_scales_2K: torch.Tensor | None,
    *rotation: Any,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v in the cache by the kernel, and return q, contiguous [T, H, d].

    See rope_kv_write. Raises ValueError if the cache is not contiguous, or if q, k, v, cos or sin has a last stride
    other than 1.
    """
    how = Rotation(*rotation)
    cos_T1d, sin_T1d = how.cos_T1d, how.sin_T1d
    rows = {"q_THd": q_THd, "k_TKd": k_TKd, "v_TKd": v_TKd, "cos_T1d": cos_T1d, "sin_T1d": sin_T1d}
    require_dense(kv_cache_N2PKd, **rows)
    num_tokens, num_heads, head_dim = q_THd.shape
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    strides = q_THd.stride(), k_TKd.stride(), v_TKd.stride(), cos_T1d.stride(), sin_T1d.stride()
    programs, token_strides, constants = _constants(num_heads, head_dim, kv_cache_N2PKd.shape[2:], strides)
    rope_kv_write_kernel[(num_tokens * programs,)](
        q_THd,
        k_TKd,
        v_TKd,
        how.q_norm_weight_d,
        how.k_norm_weight_d,
        cos_T1d,
        sin_T1d,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, kv_scales_2K),
        slot_mapping_T,
        out_THd,
        how.eps,
        *token_strides,
        **constants,
        OFFSET=how.norm_offset,
        WIDE=how.norm_wide,
        ROTARY=how.rotary_dim or head_dim,
        INTERLEAVED=how.interleaved,
        OF_PAIRS=cos_T1d.shape[-1] < (how.rotary_dim or head_dim),
        ROPE_WIDE=how.wide,
        NORM_LAST=how.norm_last,
        **dependent_launch(q_THd.device),
    )
    return out_THd


@cache
def _constants(
    num_heads: int, head_dim: int, block: tuple[int, int, int], strides: tuple[tuple[int, ...], ...]
) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return (programs per token, token strides of q, k, v, cos and sin, constexprs of the kernel).

    block: (slots per cache block, KV heads, elements of a head in the cache). strides: all strides of q, k, v, cos and
    sin.
    """
    block_size, num_kv_heads, width = block
    tile_h, tile_p, num_warps = tiles(num_heads, head_dim)
    token_strides = tuple(stride[0] for stride in strides)
    constants = {
        "STRIDE_MULTIPLE": math.gcd(8, *token_strides),
        "Q_HEAD_STRIDE": strides[0][1],
        "K_HEAD_STRIDE": strides[1][1],
        "V_HEAD_STRIDE": strides[2][1],
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "TILE_H": tile_h,
        "TILE_P": tile_p,
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }
    return cdiv(num_heads, tile_h) + cdiv(num_kv_heads, tile_h), token_strides, constants


def tiles(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return (heads per program, pairs per head rounded up to a power of two, warps per program)."""
    pairs = next_power_of_2(head_dim // 2)
    heads = min(next_power_of_2(num_heads), max(1, MAX_WARPS * ELEMENTS_PER_WARP // (2 * pairs)))
    return heads, pairs, max(1, heads * 2 * pairs // ELEMENTS_PER_WARP)
