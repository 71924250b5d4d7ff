"""Threads that have other work to do until a test lets them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_engine.process.smallest_first import SmallestFirst


@contextmanager
def busy(threads: SmallestFirst) -> Iterator[None]:
    """Keep both threads busy within a block."""
    free = threading.Event()
    for size in (1 << 30, 0):
        working = threads.submit(size, lambda: free.wait(60))
        while not working.running():
            time.sleep(0.001)
    try:
        yield
    finally:
        free.set()
