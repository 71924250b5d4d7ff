"""Returning freed memory to the system, after work that took much of it for a moment."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_free_memory() -> None:
    """Have glibc give back what it keeps of freed memory for later; with another C library nothing happens."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
