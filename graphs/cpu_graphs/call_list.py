"""A graph on a CPU: the calls that a forward made, as a list that is run again without the Python that made them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from compiled_engine.kernels import cpp_library
from compiled_engine.kernels.cpp_library import CppFunction, load_library

SOURCE = Path(cpp_library.__file__).with_name("cpp_replay.cpp")


class CallList:
    """Calls in their order; those of C++ kernels that follow one another are made by one call of C++.

    What they read and write is where it was when they were recorded.
    """

    def __init__(self) -> None:
        self._runs: list[Callable[[], Any]] = []
        self.num_kernels = self.num_others = 0

    def add_kernel(self, function: CppFunction, arguments: tuple[Any, ...]) -> None:
        last = self._runs[-1] if self._runs else None
        if not isinstance(last, _KernelCalls):
            last = _KernelCalls()
            self._runs.append(last)
        last.add(function.packed_entry, function.pack(arguments))
        self.num_kernels += 1

    def add(self, call: Callable[[], Any]) -> None:
        self._runs.append(call)
        self.num_others += 1

    def replay(self) -> None:
        for run in self._runs:
            run()


class _KernelCalls:
    """Calls as cpp_replay.cpp reads them."""

    def __init__(self) -> None:
        self._arguments: list[ctypes.Array[ctypes.c_char]] = []  # what the entries point to
        self._entries: list[int] = []
        self._table: ctypes.Array[ctypes.c_uint64] = (ctypes.c_uint64 * 0)()

    def add(self, entry: int, packed: bytes) -> None:
        self._arguments.append(ctypes.create_string_buffer(packed, len(packed)))
        self._entries += entry, ctypes.addressof(self._arguments[-1])
        self._table = (ctypes.c_uint64 * len(self._entries))(*self._entries)

    def __call__(self) -> None:
        _replay()(self._table, len(self._arguments))


@cache
def _replay() -> Any:
    function = load_library(SOURCE).replay
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return function
