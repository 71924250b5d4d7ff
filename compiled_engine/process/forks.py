"""Refuse an engine in a fork of a process that had one: it would wait for ever for threads that a fork lacks."""

from __future__ import annotations

import os

ADVICE = "use multiprocessing's start method 'spawn' or 'forkserver'"

_computing: set[int] = set()  # the process in which an engine has begun to compute


def begin_to_compute() -> None:
    """Raise RuntimeError if an engine has computed in the process that this one is a fork of.

    On a CPU PyTorch's threads are those of OpenMP, whose library waits in a fork for threads of the parent.
    """
    if _computing - {os.getpid()}:
        raise RuntimeError(f"an engine cannot run in a fork of a process that has run one; {ADVICE}")
    _computing.add(os.getpid())
