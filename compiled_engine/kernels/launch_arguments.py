"""The arguments of kernel launches: sizes, options and registers; and the strides that kernels require.

Nothing here imports Triton: passes choose what they launch on machines without it.
"""

from __future__ import annotations

from functools import cache

import torch

# Registers of a multiprocessor; threads of a warp, and warps of a group.
REGISTERS, WARP, WARPS = 1 << 16, 32, 4
# Registers of a thread that copies, in Hopper's linear for few tokens and in that for many.
LINEAR_COPYING, PRODUCT_COPYING = 40, 24
# The most registers of a thread that computes, and of any.
MOST_COMPUTING, MOST = 240, 255
# Registers are given out in multiples of this.
REGISTER_STEP = 8


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up. Triton's own function costs the host a microsecond."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the options of a programmatic dependent launch: a kernel starts before the one before it has ended.

    The kernel waits (gdc_wait) before it touches what other kernels read or write. It starts early from Hopper on;
    elsewhere DEPENDENT_LAUNCH is False, and it must not wait.
    """
    if device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9:
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}


@cache
def computing_registers(groups: int, copying: int, most: int = MOST) -> int:
    """Return the registers of a thread in `groups` groups of warps that compute.

    They share what is left by the four warps that copy, three of which are idle and have `copying` registers a thread
    each. most: of any thread at the launch.
    """
    warps = WARPS * (groups + 1)
    each = min(most, REGISTERS // (warps * WARP)) // REGISTER_STEP * REGISTER_STEP
    return min(MOST_COMPUTING, (each * warps - copying * WARPS) // (WARPS * groups) // REGISTER_STEP * REGISTER_STEP)


def require_dense(kv_cache_N2PKd: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless the cache is contiguous, and so are the elements of a row of each tensor."""
    if not kv_cache_N2PKd.is_contiguous():
        raise ValueError(f"kv_cache_N2PKd has strides {kv_cache_N2PKd.stride()}; allowed: those of a contiguous tensor")
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; allowed: 1")
