"""Steps of Triton kernels that norm and rotate heads. They round where the textbook rounds: after the norm, after its
weight, after each of the two products with cos and sin, and after their sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 with no more bits than the dtype has."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def weighted(
    x: tl.tensor, weight: tl.tensor, OFFSET: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """What is normed times the weight, rounded as rms_norm has it."""
    if OFFSET != 0:
        weight += OFFSET
    if not WIDE:
        x = rounded(x, dtype)
    return rounded(x * weight, dtype)


@triton.jit
def normed_and_rotated(
    ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    start: tl.tensor,
    d: tl.tensor,
    mask: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Elements d of the heads that start at ptr + start; zeros where mask is not set.

    start, d and mask go together by broadcasting; d runs over the last dimension. weight_ptr None leaves the norm out.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    in_head = d < HEAD_DIM
    x = tl.load(ptr + start + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(ptr + start + partner, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + d, mask=in_head, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + d, mask=in_head, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / HEAD_DIM + eps)
        x_weight = tl.load(weight_ptr + d, mask=in_head, other=0.0).to(tl.float32)
        y_weight = tl.load(weight_ptr + partner, mask=in_head, other=0.0).to(tl.float32)
        x = weighted(x * scale, x_weight, OFFSET, WIDE, dtype)
        y = weighted(y * scale, y_weight, OFFSET, WIDE, dtype)
    turned = rounded(tl.where(d < HALF, -y, y) * sin, dtype)
    return (rounded(x * cos, dtype) + turned).to(dtype)
