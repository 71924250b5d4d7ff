"""This process's memory: Python's garbage collector, held back while it would only get in the way, and freed memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def freeze_heap() -> None:
    """From now on no collection goes through the objects that exist: with PyTorch and a tokenizer these are many.

    For a process that serves or generates until it ends, once it has started. Such a collection takes a tenth of a
    second, in which no request gets a token. What is garbage already stays, until the process ends: then all is taken
    down in order.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within it nothing is collected but by reference counts."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def no_full_gc() -> Iterator[None]:
    """Within it no collection goes through all objects, of which a process with PyTorch has very many.

    What is new is collected as ever. For work that makes many objects that stay, which would bring such collections on.
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
