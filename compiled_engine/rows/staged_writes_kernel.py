"""Triton kernel that performs staged writes: it copies each write's values to the write's address on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launcher import quick_launches

TILE = 256


@quick_launches
@triton.jit
def apply_kernel(headers_ptr: tl.tensor, words_ptr: tl.tensor, TILE: tl.constexpr) -> None:
    """Copy 4-byte words to addresses on the device. Program (write) copies the words of one write.

    headers_ptr: int64 [writes, 3]: the address to write to, the index of the write's first word, the number of words.
    words_ptr: int32, the words of all writes. TILE: words that a program copies at a time.
    """
    header_ptr = headers_ptr + tl.program_id(0) * 3
    target_ptr = tl.load(header_ptr).to(tl.pointer_type(tl.int32))
    position = tl.load(header_ptr + 1).to(tl.int32)
    count = tl.load(header_ptr + 2).to(tl.int32)
    for begin in range(0, count, TILE):
        element = begin + tl.arange(0, TILE)
        mask = element < count
        tl.store(target_ptr + element, tl.load(words_ptr + position + element, mask=mask), mask=mask)


def launch(headers: torch.Tensor, words: torch.Tensor, num_writes: int) -> None:
    """Launch the kernel, which performs the first `num_writes` writes of `headers`.

    headers: int64 [writes, 3]; words: int32; both on the device or in pinned host memory. See `apply_kernel`.
    """
    apply_kernel[(num_writes,)](headers, words, TILE=TILE, num_warps=2)
