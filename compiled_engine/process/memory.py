"""Controls this process's memory: restricts Python's garbage collector, and returns freed memory to the system."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def freeze_heap() -> None:
    """Exclude all objects that exist now from later garbage collections, until the process ends.

    Call this once the process has started and is about to serve or generate. PyTorch and a tokenizer have so many
    objects that a full collection takes a tenth of a second, in which no request gets a token. Garbage in reference
    cycles that exists now is never freed.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector within a block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def no_full_gc() -> Iterator[None]:
    """Prevent full garbage collections within a block; young objects are collected as usual.

    Used for work that creates many long-lived objects, which would trigger full collections. These are slow in a
    process with PyTorch, which has very many objects.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def return_free_memory() -> None:
    """Give memory that glibc's allocator keeps for reuse back to the system. Does nothing with another C library."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
