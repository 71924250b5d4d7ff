"""How many CPU threads a step uses: no more than have enough to do each.

A small step has dozens of parallel regions of a few microseconds; every one of them waits for all threads, and on
a busy machine for the operating system to run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiply-adds: a few tenths of a millisecond of one core.
LEAST_WORK = 2_500_000


@contextmanager
def threads_for_step(num_tokens: int, num_parameters: int, device: torch.device) -> Iterator[None]:
    """Run a step of num_tokens tokens with as many threads as it is worth; the caller's number is put back."""
    before = torch.get_num_threads() if device.type == "cpu" else 1
    worth = max(1, num_tokens * num_parameters // LEAST_WORK)
    if worth >= before:
        yield
        return
    torch.set_num_threads(worth)
    try:
        yield
    finally:
        torch.set_num_threads(before)
