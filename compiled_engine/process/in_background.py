"""Run work in a thread: a value computed while its owner continues, and imports of torch and its compiler."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class InBackground(Generic[Value]):
    """Calls `make` at once, in a new thread.

    The threads share the GIL, so this only saves time while one of them waits for a file, a device or another process.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0
        thread = ThreadPoolExecutor(1)
        self._future = thread.submit(self._timed, make)  # `make` is not kept: it may refer to the owner of this object
        thread.shutdown(wait=False)

    def _timed(self, make: Callable[[], Value]) -> Value:
        try:
            return make()
        finally:
            self._seconds = time.perf_counter() - self._start

    def result(self) -> Value:
        """Wait for the value and return it. Raises as `make`."""
        return self._future.result()

    @property
    def seconds(self) -> float:
        """Duration of the work, once the result is there."""
        return self._seconds


def import_apart(name: str) -> Any:
    """Import a module in a new thread and return it. Raises as the import."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()
