"""Detects that this process is a fork of a process that has an engine.

A fork lacks the engine's threads, and must not use the engine's device and child processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ADVICE = "use multiprocessing's start method 'spawn' or 'forkserver'"

_computing: set[int] = set()  # id of the process in which an engine has computed with threads or CUDA


def begin_to_compute(*, leaves_threads: bool) -> None:
    """Raise RuntimeError if this process is a fork of one in which an engine has computed with threads or CUDA.

    In such a fork OpenMP, which PyTorch uses on CPUs, would wait for threads of the parent, and CUDA does not work.
    leaves_threads: the caller is going to use threads or CUDA. This is recorded, so that later forks of this process
    raise.
    """
    if _computing - {os.getpid()}:
        raise RuntimeError(f"an engine cannot run in a fork of a process that has run one; {ADVICE}")
    if leaves_threads:
        _computing.add(os.getpid())


class Owner:
    """Remembers the process that created an engine object. kind: name of the object's class, for errors."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return self._process == os.getpid()

    def require_here(self) -> None:
        """Raise RuntimeError if this process is not the one that created the engine object, but a fork of it."""
        if not self.is_here:
            raise RuntimeError(
                f"this {self._kind} belongs to the process that this one is a fork of; {ADVICE}, and make one here"
            )


def unless_forked(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `function` in this process, and does nothing in forks of it. Used for finalizers."""
    maker = os.getpid()

    def call(*arguments: Any) -> None:
        if os.getpid() == maker:
            function(*arguments)

    return call
