"""A C++ kernel as a function of Python, whose calls can be recorded and made again."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from compiled_engine.kernels.cpp_library import load_library

POINTER, INTEGER, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# How an argument lies in the 64 bits that the kernel's second entry reads.
_PACKED: dict[type[Any], str] = {POINTER: "Q", INTEGER: "q", NUMBER: "f4x"}


class CallRecorder(Protocol):
    """Is told of each call before it is made."""

    def add_call(self, function: CppFunction, arguments: tuple[Any, ...]) -> None: ...


recorder: ContextVar[CallRecorder | None] = ContextVar("recorder", default=None)


class CppFunction:
    """A function of a C++ file that has a packed entry beside it, see cpp_packed.h; it takes float32, not float64.

    types: of its arguments. Pointers are addresses, or None. Raises CannotCompile, see load_library.
    """

    def __init__(self, source: Path, name: str, types: Sequence[type[Any]]) -> None:
        library = load_library(source)
        self._function = library[name]
        self._function.argtypes, self._function.restype = list(types), None
        self._packing = "<" + "".join(_PACKED[kind] for kind in types)
        packed_entry = ctypes.cast(library[f"{name}_packed"], ctypes.c_void_p).value
        assert packed_entry is not None
        self.packed_entry: int = packed_entry

    def __call__(self, *arguments: Any) -> None:
        if (listening := recorder.get()) is not None:
            listening.add_call(self, arguments)
        self._function(*arguments)

    def pack(self, arguments: tuple[Any, ...]) -> bytes:
        """What the packed entry reads."""
        return struct.pack(self._packing, *(0 if argument is None else argument for argument in arguments))
