"""What Triton finds out about itself before its first kernel, found out beside what a start does before that.

Triton names a kernel's binary after digests of its own files, some hundred megabytes, and the version of its
assembler. It keeps both as long as the process lives.
"""

from __future__ import annotations

from functools import cache

from compiled_engine.process.in_background import InBackground


@cache
def triton_digest() -> InBackground[None]:
    """The first call starts a thread, and every call gives the same one. Its `result` waits, and raises nothing."""
    return InBackground(_digest)


def _digest() -> None:
    try:
        from triton.runtime.cache import triton_key

        triton_key()  # reading and hashing leave Python's lock to others
    except Exception:  # another version, or a damaged one: the first kernel will do it, and say what is wrong
        return
