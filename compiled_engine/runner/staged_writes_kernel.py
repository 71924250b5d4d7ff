"""Triton kernel: make staged writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launcher import quick_launches

TILE = 256


@quick_launches
@triton.jit
def apply_kernel(memory_ptr: tl.tensor, buffer_ptr: tl.tensor, TILE: tl.constexpr) -> None:
    """One program for a write: header (where it goes, where its values are, how many), then the values."""
    header_ptr = buffer_ptr + tl.program_id(0) * 3
    start = tl.load(header_ptr)
    position = tl.load(header_ptr + 1)
    count = tl.load(header_ptr + 2)
    for begin in range(0, count, TILE):
        element = begin + tl.arange(0, TILE)
        mask = element < count
        tl.store(memory_ptr + start + element, tl.load(buffer_ptr + position + element, mask=mask), mask=mask)


def launch(memory: torch.Tensor, buffer: torch.Tensor, num_writes: int) -> None:
    """memory: int32 on the device; buffer: int32, pinned on the host or on the device."""
    apply_kernel[(num_writes,)](memory, buffer, TILE=TILE, num_warps=2)
