"""The number of cores, by which processes and threads are counted."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores on which this process may run, where the system tells, or else of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
