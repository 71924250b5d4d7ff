"""Control this process's memory: suspend Python's garbage collector, and return freed memory to the system."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def freeze_heap() -> None:
    """Exclude all existing objects from later collections.

    For a process that has started, and serves or generates until it ends. With PyTorch and a tokenizer there are many
    objects: a full collection takes a tenth of a second, in which no request gets a token. Existing garbage stays until
    the process ends.
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
    """Prevent full garbage collections within a block: a process with PyTorch has very many objects.

    New objects are collected as usual. For work that creates many long-lived objects, which would trigger full
    collections.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def return_free_memory() -> None:
    """Return glibc's cached free memory to the system; does nothing with another C library."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
