"""Detect forks of a process that has an engine: they lack its threads, and must not use its device and child
processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ADVICE = "use multiprocessing's start method 'spawn' or 'forkserver'"

_computing: set[int] = set()  # id of the process in which an engine has computed with threads or CUDA


def begin_to_compute(*, leaves_threads: bool) -> None:
    """Raise RuntimeError if this process is a fork of one in which an engine has computed with threads or CUDA.

    OpenMP, which PyTorch uses on a CPU, would wait in a fork for threads of the parent. CUDA does not work in a fork at
    all.
    """
    if _computing - {os.getpid()}:
        raise RuntimeError(f"an engine cannot run in a fork of a process that has run one; {ADVICE}")
    if leaves_threads:
        _computing.add(os.getpid())


class Owner:
    """The process that created an engine. kind: the engine's class."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return self._process == os.getpid()

    def require_here(self) -> None:
        """Raise RuntimeError in a fork of that process."""
        if not self.is_here:
            raise RuntimeError(
                f"this {self._kind} belongs to the process that this one is a fork of; {ADVICE}, and make one here"
            )


def unless_forked(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function so that it does nothing in forks of this process; for finalizers."""
    maker = os.getpid()

    def call(*arguments: Any) -> None:
        if os.getpid() == maker:
            function(*arguments)

    return call
