"""How many CPU threads a step uses: one where the work is too small to be worth waking the others.

A small step has dozens of parallel regions of a few microseconds; every one of them waits for all threads, and on
a busy machine for the operating system to run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiply-adds: about two milliseconds of one core.
SMALL_STEP = 32_000_000


@contextmanager
def threads_for_step(num_tokens: int, num_parameters: int, device: torch.device) -> Iterator[None]:
    """Run a step of num_tokens tokens with as many threads as it is worth; the caller's number is put back."""
    if device.type != "cpu" or num_tokens * num_parameters > SMALL_STEP or torch.get_num_threads() == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
