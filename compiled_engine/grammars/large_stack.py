"""Runs what may recurse as deep as its input is long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# Bytes of address space, of which no more are used than the depth takes: a grammar of the most bytes that are allowed,
# each rule of which is only in the one before, needs less than a third. Beyond its stack a process is killed.
STACK_BYTES = 512 * 2**20

# The size is one setting of the whole process.
_STACK_SIZE = threading.Lock()

Result = TypeVar("Result")


def on_large_stack(work: Callable[[], Result]) -> Result:
    """In a thread of its own, which is waited for. Raises what `work` raises."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="large stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()
