"""Computes arguments of kernel launches (grid sizes, options, registers), and checks strides or makes tensors dense.

This module does not import Triton, since passes choose launches on machines without Triton.
"""

from __future__ import annotations

from functools import cache

import torch

# Registers per multiprocessor; threads per warp, and warps per group.
REGISTERS, WARP, WARPS = 1 << 16, 32, 4
# Registers per copying thread, in Hopper's linear kernels for few and for many tokens.
LINEAR_COPYING, PRODUCT_COPYING = 40, 24
# Most registers per computing thread, and per any thread.
MOST_COMPUTING, MOST = 240, 255
# Registers are allocated in multiples of this.
REGISTER_STEP = 8


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up. Triton's own function takes a microsecond on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return launch arguments for a programmatic dependent launch, which devices support from Hopper on.

    Such a launch starts a kernel before the previous one has ended. The kernel's argument DEPENDENT_LAUNCH is then
    True, and the kernel must call gdc_wait before it touches memory that other kernels may still read or write. On
    other devices DEPENDENT_LAUNCH is False, and the kernel must not call gdc_wait.
    """
    if device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9:
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}


def register_limit(most: int) -> dict[str, int]:
    """Return launch arguments that limit a thread to `most` registers; none for AMD GPUs, which lack this limit."""
    return {"maxnreg": most} if torch.version.hip is None else {}


def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU, for whose shared memory and instructions some tiles are."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def computing_registers(groups: int, copying: int, most: int = MOST) -> int:
    """Return the registers per thread of the computing warps, for a kernel in which other warps copy.

    groups: number of groups of four warps that compute. A further group copies, with `copying` registers per thread;
    three of its warps are idle. The computing warps share the remaining registers. most: the limit on the registers per
    thread at the launch, when all warps still have the same number.
    """
    warps = WARPS * (groups + 1)
    each = min(most, REGISTERS // (warps * WARP)) // REGISTER_STEP * REGISTER_STEP
    return min(MOST_COMPUTING, (each * warps - copying * WARPS) // (WARPS * groups) // REGISTER_STEP * REGISTER_STEP)


def with_dense_items(x_T: torch.Tensor) -> torch.Tensor:
    """Return x_T itself if each item (x_T[i]) is contiguous in memory, otherwise a contiguous copy."""
    return x_T if x_T[0].is_contiguous() else x_T.contiguous()


def require_dense(kv_cache_N2PKd: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless the cache is contiguous and each tensor has stride 1 in its last dimension."""
    if not kv_cache_N2PKd.is_contiguous():
        raise ValueError(f"kv_cache_N2PKd has strides {kv_cache_N2PKd.stride()}; allowed: those of a contiguous tensor")
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; allowed: 1")
