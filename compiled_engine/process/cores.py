"""Counts the CPU cores, which determine the default numbers of processes and threads."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores on which this process may run, or of all cores if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
