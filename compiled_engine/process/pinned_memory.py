"""Large host memory, pinned so that a GPU can copy to and from it asynchronously.

Pinning takes as long as the system needs to provide the memory's pages, one after the other in the pinning thread. So
pages are large where the system has large ones, and all cores provide them before they are pinned.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import torch

from compiled_engine.process.cores import usable_cores

# Bytes of which a thread provides the pages at a time, a multiple of any page.
PART_BYTES = 64 << 20


class PinnedMemory:
    """Host memory of `num_bytes` bytes. Its attribute `bytes` is a uint8 tensor [num_bytes] in this memory.

    pinned: pin the memory, for copies to and from a GPU; otherwise the system provides pages when they are first used.
    The memory is not from PyTorch's allocator, which would round its size up to a power of two. Raises RuntimeError if
    the host lacks memory or the memory cannot be pinned.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        available = psutil.virtual_memory().available
        if num_bytes > available:
            raise RuntimeError(f"{num_bytes / 2**30:.1f} GiB are needed, {available / 2**30:.1f} GiB are available")
        memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        self._unpin: Callable[[], Any] = _do_nothing
        if pinned and num_bytes:
            provide_pages(memory)
            address = self.bytes.data_ptr()
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, num_bytes, 0)))
            self._unpin = weakref.finalize(self, _unregister, address)

    def close(self) -> None:
        """Unpin the memory. No copy may be running."""
        self._unpin()


def provide_pages(memory: mmap.mmap) -> None:
    """Write to each page of new memory, on all cores, so that the system provides the pages."""
    with suppress(AttributeError, OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_n = np.frombuffer(memory, np.uint8)

    def touch(start: int) -> None:
        bytes_n[start : start + PART_BYTES : mmap.PAGESIZE] = 0  # numpy lets other threads run meanwhile

    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(touch, range(0, len(memory), PART_BYTES)))


def _do_nothing() -> None: ...


def _unregister(address: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
