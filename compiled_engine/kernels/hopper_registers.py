"""How the kernels of linears on Hopper divide a multiprocessor's registers: warps that copy need few of them."""

from __future__ import annotations

# Registers of a multiprocessor; threads of a warp, and warps of a group.
REGISTERS, WARP, WARPS = 1 << 16, 32, 4
# Of a thread that copies, in the kernel for few tokens and in that for many.
LINEAR_COPYING, PRODUCT_COPYING = 40, 24
# The most registers of a thread that computes, and of any.
MOST_COMPUTING, MOST = 240, 255
# What registers are given out in.
STEP = 8


def computing_registers(groups: int, copying: int, most: int = MOST) -> int:
    """Of a thread of `groups` groups of warps that compute: what is left by the four warps that copy, three of which
    are idle and have `copying` registers a thread each. most: of any thread at the launch."""
    warps = WARPS * (groups + 1)
    each = min(most, REGISTERS // (warps * WARP)) // STEP * STEP
    return min(MOST_COMPUTING, (each * warps - copying * WARPS) // (WARPS * groups) // STEP * STEP)
