"""Triton's digest of its own files, hundreds of megabytes: made by a thread while this process imports torch.

Triton names every binary after it, so the first kernel waits for it. Python keeps it for the rest of the process.
"""

from __future__ import annotations

from functools import cache

from compiled_engine.process.cuda_context import cuda_context
from compiled_engine.process.in_background import InBackground


@cache
def triton_digest(index: int) -> InBackground[bool]:
    """The first call starts a thread, and every call gives the same one. For a process that will run on the GPU
    `index`, see `cuda_context`.

    The result says whether the digest was made, which it is not without that GPU.
    """
    context = cuda_context(index)
    return InBackground(lambda: context.result() and _make())


def _make() -> bool:
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception:  # another version, or a damaged one: the first kernel will do it, and say what is wrong
        return False
    return True
