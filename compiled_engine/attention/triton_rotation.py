"""Device functions of Triton kernels that norm and rotate heads.

Results are rounded where the textbook models round: after the norm (unless WIDE), after the norm's weight, after the
multiplications with cos and with sin, and after the sum of both.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return x rounded to the dtype, in fp32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def weighted(
    x: tl.tensor, weight: tl.tensor, OFFSET: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Return x, normed values, times the weight, rounded as in rms_norm. OFFSET, WIDE: see Rotation."""
    if OFFSET != 0:
        weight += OFFSET
    if not WIDE:
        x = rounded(x, dtype)
    return rounded(x * weight, dtype)


@triton.jit
def turned(
    x: tl.tensor,
    y: tl.tensor,
    x_weight: tl.tensor | None,
    y_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    d: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return elements d of heads, normed if there are weights, and rotated.

    x, y: fp32, these elements and their partners in the rotation, half a head apart. x_weight, y_weight: of any dtype;
    None: no norm. cos, sin: fp32, at d.
    """
    if x_weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / HEAD_DIM + eps)
        x = weighted(x * scale, x_weight.to(tl.float32), OFFSET, WIDE, dtype)
        y = weighted(y * scale, y_weight.to(tl.float32), OFFSET, WIDE, dtype)
    crossed = rounded(tl.where(d < HEAD_DIM // 2, -y, y) * sin, dtype)
    return (rounded(x * cos, dtype) + crossed).to(dtype)


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
    """Return elements d of the heads that start at ptr + start, normed and rotated; zeros where mask is not set.

    start, d and mask are broadcast; d runs over the last dimension. weight_ptr None: no norm.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    in_head = d < HEAD_DIM
    x = tl.load(ptr + start + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(ptr + start + partner, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + d, mask=in_head, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + d, mask=in_head, other=0.0).to(tl.float32)
    x_weight = None
    y_weight = None
    if weight_ptr is not None:
        x_weight = tl.load(weight_ptr + d, mask=in_head, other=0.0)
        y_weight = tl.load(weight_ptr + partner, mask=in_head, other=0.0)
    return turned(x, y, x_weight, y_weight, cos, sin, d, eps, HEAD_DIM, OFFSET, WIDE, dtype)
