"""Work in a thread of its own: a value that is made while its owner goes on, and imports of torch and its compiler."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class InBackground(Generic[Value]):
    """Calls `make` at once, in a thread of its own.

    What holds Python's lock there holds it up here: there is something to gain where one of the two waits for a file,
    a device or another process.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0
        thread = ThreadPoolExecutor(1)
        self._future = thread.submit(self._timed, make)  # which is not kept: it may refer to the owner of this object
        thread.shutdown(wait=False)

    def _timed(self, make: Callable[[], Value]) -> Value:
        try:
            return make()
        finally:
            self._seconds = time.perf_counter() - self._start

    def result(self) -> Value:
        """The value, once it is there. Raises what `make` raised."""
        return self._future.result()

    @property
    def seconds(self) -> float:
        """Return how long the work took, once the result is there."""
        return self._seconds


def import_apart(name: str) -> Any:
    """The module, imported by a thread of its own. Raises what the import raises."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()
