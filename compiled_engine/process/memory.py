"""Control of this process's memory: Python's garbage collector is held back while it only costs time, and freed memory
is returned."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def freeze_heap() -> None:
    """Exclude all existing objects from later collections: with PyTorch and a tokenizer these are many.

    For a process that serves or generates until it ends, once it has started. A full collection takes a tenth of a
    second, in which no request gets a token. Existing garbage stays until the process ends.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while the block runs."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def no_full_gc() -> Iterator[None]:
    """Prevent full garbage collections while the block runs: a process with PyTorch has very many objects.

    New objects are collected as usual. For work that makes many long-lived objects, which would trigger full
    collections.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def return_free_memory() -> None:
    """Have glibc give back what it keeps of freed memory for later; with another C library nothing happens."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
