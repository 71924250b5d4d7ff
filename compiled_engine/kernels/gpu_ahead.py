"""What Triton's first kernel waits for, found out by a thread beside what a start does before it.

Triton names a kernel's binary after digests of its own files, some hundred megabytes, and after the version of its
assembler, which it asks by running it. Both happen once in a process, and leave Python's lock to others.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.process.begin_gpu import triton_digest
from compiled_engine.process.in_background import InBackground


@cache
def triton_digests(device: torch.device) -> InBackground[None]:
    """The first call starts a thread, and every call gives the same one. Its `result` waits, and raises nothing."""
    return InBackground(lambda: _digest(device))


def _digest(device: torch.device) -> None:
    triton_digest(device.index or 0).result()
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()  # unless it was made above
        major, minor = torch.cuda.get_device_capability(device)
        make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()
    except Exception:  # another version, or a damaged one: the first kernel will do it, and say what is wrong
        return
