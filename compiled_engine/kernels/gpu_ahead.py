"""What the first kernels on a GPU wait for, made by threads beside what a start does before them.

Triton names a kernel's binary after digests of its own files, some hundred megabytes, and after the version of its
assembler, which it asks by running it. cuBLAS loads its kernels. Each happens once in a process, and leaves Python's
lock to others.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.process.in_background import InBackground


@cache
def triton_digests(device: torch.device) -> InBackground[None]:
    """The first call starts a thread, and every call gives the same one. Its `result` waits, and raises nothing."""
    return InBackground(lambda: _digest(device))


@cache
def first_matrix_product(device: torch.device, dtype: torch.dtype) -> InBackground[None]:
    """The same for cuBLAS: a handle, which the next thread takes over, and the library's code."""
    return InBackground(lambda: _multiply(device, dtype))


def _digest(device: torch.device) -> None:
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()
        major, minor = torch.cuda.get_device_capability(device)
        make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()
    except Exception:  # another version, or a damaged one: the first kernel will do it, and say what is wrong
        return


@torch.inference_mode()
def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    try:
        some = torch.zeros(16, 16, device=device, dtype=dtype)
        torch.mm(some, some)
    except RuntimeError:  # too little memory: what the engine itself allocates will say so
        return
