"""Memory that nobody has written, full of what no computation may read: NaN in floats, the largest number in integers.

PyTorch fills it where its algorithms are deterministic: on every thread, wherever Python or C++ allocates, below what
traces see. That mode chooses other algorithms too, so what Python sees and sets of it has no effect: the compiler and
the keys of its cache are those of users. Compiled code allocates in ways of its own, which are filled here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

# Set while a session of tests is poisoned, for processes that tests start.
VARIABLE = "COMPILED_ENGINE_TESTS_POISON"
# Ways of compiled code to allocate.
_OF_COMPILED_CODE = ("_empty_strided_cpu", "_empty_strided_cpu_pinned", "_empty_strided_cuda")
_for_good = ExitStack()


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Poison a tensor of any dtype, and return it."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_and_fill(*arguments: Any) -> torch.Tensor:
        made = allocate(*arguments)
        return fill(made) if torch._C._get_deterministic_algorithms() else made

    return allocate_and_fill


class _Seen:
    """The mode of deterministic algorithms as Python code sees it."""

    def __init__(self) -> None:
        self.mode = torch.are_deterministic_algorithms_enabled()
        self.warn_only = torch.is_deterministic_algorithms_warn_only_enabled()

    def set(self, mode: bool, *, warn_only: bool = False) -> None:
        self.mode, self.warn_only = mode, warn_only

    def instead_of_torch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch, "use_deterministic_algorithms", self.set)
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: self.mode)
        patch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: self.warn_only)


@contextmanager
def poisoned(on: bool = True) -> Iterator[None]:
    """Fill all new memory with poison within a block; with `on` False, fill none."""
    before = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    with pytest.MonkeyPatch.context() as patch:
        if on:
            _Seen().instead_of_torch(patch)
            guards = torch._C._dynamo.guards
            for name in _OF_COMPILED_CODE:
                if hasattr(guards, name):
                    patch.setattr(guards, name, _filled(getattr(guards, name)))
        torch._C._set_deterministic_algorithms(on, warn_only=on)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def poison_as_asked() -> None:
    """Poison this process until it ends, if the session of tests that started it is poisoned."""
    if VARIABLE in os.environ:
        _for_good.enter_context(poisoned())
