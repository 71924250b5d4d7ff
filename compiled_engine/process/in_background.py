"""Runs work in a new thread: computes a value while the caller continues, or imports a module."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class InBackground(Generic[Value]):
    """Calls `make` in a new thread, started at once; `result` waits for the value.

    The threads share the GIL, so this saves time only while one of them waits for a file, a device or another process.
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
        """Wait for the value and return it. Raises the exception that `make` raised."""
        return self._future.result()

    @property
    def seconds(self) -> float:
        """Duration of `make` in seconds; 0 until it has ended."""
        return self._seconds


def import_apart(name: str) -> Any:
    """Import a module in a new thread, wait for it, and return it. Raises the exception that the import raised."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()
