"""Forks of a process that has an engine: they lack its threads, and its device and processes are not theirs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ADVICE = "use multiprocessing's start method 'spawn' or 'forkserver'"

_computing: set[int] = set()  # the process in which an engine has begun to compute with threads or CUDA


def begin_to_compute(*, leaves_threads: bool) -> None:
    """Raise RuntimeError if an engine has computed in the process that this one is a fork of, and left threads there.

    On a CPU PyTorch's threads are those of OpenMP, whose library waits in a fork for threads of the parent. CUDA does
    not work in a fork at all.
    """
    if _computing - {os.getpid()}:
        raise RuntimeError(f"an engine cannot run in a fork of a process that has run one; {ADVICE}")
    if leaves_threads:
        _computing.add(os.getpid())


class Owner:
    """The process that has made an engine. kind: the engine's class."""

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
    """Return a function that does the same in this process, and nothing in forks of it: for finalizers."""
    maker = os.getpid()

    def call(*arguments: Any) -> None:
        if os.getpid() == maker:
            function(*arguments)

    return call
