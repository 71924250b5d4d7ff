"""Searches scales of groups of four-bit codes on a GPU: a kernel that reads each value once for all scales it tries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Values of a program, in whole groups.
_VALUES = 4096
# Adding and subtracting it rounds a float32 between -2^22 and 2^22 to the nearest integer, and halves to even ones.
_TO_INTEGER = 1.5 * 2.0**23


@triton.jit
def _to_bfloat16(x):  # type: ignore[no-untyped-def]
    """Round positive float32 numbers to bfloat16, halves to even. Triton's interpreter would cut them off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    is_number = x <= float("inf")  # the bits of a NaN could overflow
    return tl.where(is_number, rounded, x)


@triton.jit
def scale_search_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    factors_ptr,  # float32
    scales_ptr,  # float32, the result
    num_groups,
    NUM_FACTORS: tl.constexpr,
    SMALLEST: tl.constexpr,
    ZERO: tl.constexpr,
    TO_INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    group_G = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside_G = group_G < num_groups
    offsets_GC = group_G[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x_GC = tl.load(values_ptr + offsets_GC, mask=inside_G[:, None], other=0.0).to(tl.float32)
    # The sum is NaN for a group with a NaN, which a maximum would pass over.
    largest_G = tl.maximum(tl.max(tl.abs(x_GC), 1), SMALLEST) + tl.sum(x_GC * 0.0, 1)
    best_G = _to_bfloat16(largest_G * tl.load(factors_ptr))
    least_G = tl.full([GROUPS], float("inf"), tl.float64)
    for index in range(NUM_FACTORS):
        scale_G = _to_bfloat16(largest_G * tl.load(factors_ptr + index))
        code_GC = (tl.div_rn(x_GC, tl.broadcast_to(scale_G[:, None], [GROUPS, SIZE])) + TO_INTEGER) - TO_INTEGER
        code_GC = tl.minimum(tl.maximum(code_GC, -ZERO), ZERO - 1)
        # The product is exact: a code has 4 bits and a scale 8.
        error_GC = code_GC * scale_G[:, None] - x_GC
        # In float64 the order of the sum does not decide between two scales.
        error_G = tl.sum((error_GC * error_GC).to(tl.float64), 1)
        best_G = tl.where(error_G < least_G, scale_G, best_G)
        least_G = tl.minimum(error_G, least_G)
    tl.store(scales_ptr + group_G, best_G, mask=inside_G)


def searched_scales(values_GC: torch.Tensor, factors: Sequence[float], smallest: float, zero: int) -> torch.Tensor:
    """Return for each group the bfloat16 scale with the least squared error, as float32 [G].

    values_GC: the groups' values, contiguous, on a GPU; a group's size must be a power of two. factors: the scales that
    are tried, in parts of a group's largest magnitude, which is taken to be at least `smallest`. Of equal errors the
    first counts. Codes are from -zero to zero - 1.
    """
    num_groups, size = values_GC.shape
    found_G = torch.empty(num_groups, dtype=torch.float32, device=values_GC.device)
    groups = max(1, _VALUES // size)
    scale_search_kernel[(triton.cdiv(num_groups, groups),)](
        values_GC,
        torch.tensor(factors, dtype=torch.float32, device=values_GC.device),
        found_G,
        num_groups,
        NUM_FACTORS=len(factors),
        SMALLEST=smallest,
        ZERO=float(zero),
        TO_INTEGER=_TO_INTEGER,
        GROUPS=groups,
        SIZE=size,
        num_warps=8,
    )
    return found_G
