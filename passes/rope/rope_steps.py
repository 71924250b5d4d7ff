"""Triton device functions that load, norm, rotate, quantise and store heads as pairs of elements rotated together.

They round where textbook code does: after the norm, after the multiplication by its weight, after each product with cos
and sin, and after their sum. In names, H are heads and P pairs of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.attention.triton_codes import bfloat16_values, codes_of, stored_scale
from compiled_engine.attention.triton_rotation import rounded, weighted


@triton.jit
def places(
    pair_P: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (index of the first element, index of the second element) in a head, for each pair of elements.

    pair_P: numbers of the pairs. ROTARY: number of elements that are rotated; pairs with numbers from ROTARY / 2 on
    consist of the other elements. INTERLEAVED: the elements of a pair are neighbours; otherwise the elements of a
    rotated pair are ROTARY / 2 apart.
    """
    if INTERLEAVED:
        return 2 * pair_P, 2 * pair_P + 1
    HALF: tl.constexpr = ROTARY // 2
    if ROTARY == HEAD_DIM:
        return pair_P, pair_P + HALF
    else:
        rest_P = pair_P + HALF
        return (
            tl.where(pair_P < HALF, pair_P, rest_P),
            tl.where(pair_P < HALF, rest_P, rest_P + (HEAD_DIM - ROTARY) // 2),
        )


@triton.jit
def load_pairs(
    ptr: tl.tensor, offsets: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return (
        tl.load(ptr + offsets + first, mask=mask, other=0.0),
        tl.load(ptr + offsets + second, mask=mask, other=0.0),
    )


@triton.jit
def store_pairs(
    ptr: tl.tensor,
    offsets: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    mask: tl.tensor,
    one: tl.tensor,
    other: tl.tensor,
) -> None:
    tl.store(ptr + offsets + first, one, mask=mask)
    tl.store(ptr + offsets + second, other, mask=mask)


@triton.jit
def rounded_pairs(
    one_HP: tl.tensor,
    other_HP: tl.tensor,
    mask_HP: tl.tensor,
    scale_ptr: tl.tensor,
    head_H1: tl.tensor,
    mask_H1: tl.tensor,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Quantise heads for a KV cache of `dtype`. Returns (codes of the pairs' first elements, of their second elements).

    For 8-bit integers, the scales are computed and stored; for other codes, scales are read if there are any. mask_HP:
    pairs that exist. scale_ptr, head_H1, mask_H1: see triton_codes.rounded_heads.
    """
    one_HP = tl.where(mask_HP, one_HP.to(tl.float32), 0.0)
    other_HP = tl.where(mask_HP, other_HP.to(tl.float32), 0.0)
    scale_H1 = None
    if dtype == tl.uint8:
        largest_H1 = tl.max(tl.maximum(tl.abs(one_HP), tl.abs(other_HP)), 1, keep_dims=True)
        stored_H1 = stored_scale(largest_H1, dtype)
        tl.store(scale_ptr + head_H1, stored_H1, mask=mask_H1)
        scale_H1 = bfloat16_values(stored_H1)
    elif scale_ptr is not None:
        scale_H1 = tl.load(scale_ptr + head_H1, mask=mask_H1, other=1.0)
    return codes_of(one_HP, scale_H1, dtype), codes_of(other_HP, scale_H1, dtype)  # type: ignore[arg-type]


@triton.jit
def normed_pairs(
    first_HP: tl.tensor,
    second_HP: tl.tensor,
    weight_first_HP: tl.tensor,
    weight_second_HP: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Apply RMSNorm to heads that are given as the first and the second elements of pairs, fp32 [H, P] each.

    Returns the normed heads in the same form. Elements beyond HEAD_DIM must be zeros, since they enter the sum of
    squares. OFFSET, WIDE: see rms_norm.normed. dtype: the dtype of the results.
    """
    squares_H = tl.sum(first_HP * first_HP + second_HP * second_HP, 1)
    scale_H1 = tl.rsqrt(squares_H / HEAD_DIM + eps)[:, None]
    return (
        weighted(first_HP * scale_H1, weight_first_HP.to(tl.float32), OFFSET, WIDE, dtype),
        weighted(second_HP * scale_H1, weight_second_HP.to(tl.float32), OFFSET, WIDE, dtype),
    )


@triton.jit
def normed_and_rotated(
    ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    head_H1: tl.tensor,
    pair_HP: tl.tensor,
    mask_HP: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OF_PAIRS: tl.constexpr,
    ROPE_WIDE: tl.constexpr,
    NORM_LAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load, norm and rotate heads. Returns (the first elements of the pairs, the second elements), [H, P] each.

    ptr: q or k of a token; head_H1: offset of each head; pair_HP: numbers of the pairs; mask_HP: pairs that exist.
    weight_ptr: weight of the norm, [HEAD_DIM], or None without a norm. cos_ptr, sin_ptr: those of the token's position.
    ROTARY, INTERLEAVED: see `places`; elements that are not rotated are only normed.
    OF_PAIRS: cos and sin have one value per pair; otherwise one per element. ROPE_WIDE: do not round within the
        rotation.
    NORM_LAST: norm after the rotation instead of before. OFFSET, WIDE: of the norm, see rms_norm.normed.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    one_HP, other_HP = places(pair_HP, HEAD_DIM, ROTARY, INTERLEAVED)
    turned_HP = mask_HP if ROTARY == HEAD_DIM else mask_HP & (pair_HP < ROTARY // 2)
    first_HP, second_HP = load_pairs(ptr, head_H1, one_HP, other_HP, mask_HP)
    if OF_PAIRS:
        cos_first_HP = tl.load(cos_ptr + pair_HP, mask=turned_HP, other=0.0)
        sin_first_HP = tl.load(sin_ptr + pair_HP, mask=turned_HP, other=0.0)
        cos_second_HP = cos_first_HP
        sin_second_HP = sin_first_HP
    else:
        cos_first_HP, cos_second_HP = load_pairs(cos_ptr, 0, one_HP, other_HP, turned_HP)
        sin_first_HP, sin_second_HP = load_pairs(sin_ptr, 0, one_HP, other_HP, turned_HP)
    first_HP = first_HP.to(tl.float32)
    second_HP = second_HP.to(tl.float32)
    if weight_ptr is not None:
        weight_first_HP, weight_second_HP = load_pairs(weight_ptr, 0, one_HP, other_HP, mask_HP)
        if not NORM_LAST:
            first_HP, second_HP = normed_pairs(
                first_HP, second_HP, weight_first_HP, weight_second_HP, eps, HEAD_DIM, OFFSET, WIDE, dtype
            )
    step: tl.constexpr = tl.float32 if ROPE_WIDE else dtype
    first_cos_HP = rounded(first_HP * cos_first_HP.to(tl.float32), step)
    second_cos_HP = rounded(second_HP * cos_second_HP.to(tl.float32), step)
    first_sin_HP = rounded(first_HP * sin_second_HP.to(tl.float32), step)
    second_sin_HP = rounded(second_HP * sin_first_HP.to(tl.float32), step)
    one = (first_cos_HP - second_sin_HP).to(dtype)
    other = (second_cos_HP + first_sin_HP).to(dtype)
    if ROTARY != HEAD_DIM:
        one = tl.where(turned_HP, one, first_HP.to(dtype))
        other = tl.where(turned_HP, other, second_HP.to(dtype))
    if NORM_LAST and weight_ptr is not None:
        one, other = normed_pairs(
            one.to(tl.float32),
            other.to(tl.float32),
            weight_first_HP,
            weight_second_HP,
            eps,
            HEAD_DIM,
            OFFSET,
            WIDE,
            dtype,
        )
    return one.to(dtype), other.to(dtype)
