"""Compiles C++ kernels for CPUs, once per machine, with the compiler that Inductor uses, and calls them by ctypes.

Calls can be recorded, to replay them without Python (graphs/cpu_graphs).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from compiled_engine.kernels.cache_folder import is_whole, keep_digest, kernel_folder
from compiled_engine.process.cache_root import default_root

HEADERS = tuple(Path(__file__).with_name(name) for name in ("cpp_vectors.h", "cpp_packed.h", "cpp_kv_codes.h"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
CPU_INFO = Path("/proc/cpuinfo")
POINTER, INTEGER, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# struct formats of arguments in the 64-bit slots that a kernel's packed entry reads.
_PACKED: dict[type[Any], str] = {POINTER: "Q", INTEGER: "q", NUMBER: "f4x"}
recorder: ContextVar[CallRecorder | None] = ContextVar("recorder", default=None)


class CannotCompile(RuntimeError):
    """Raised if there is no C++ compiler, or if the compiler failed. The message has the reason."""


def compiler_command() -> list[str]:
    """Return the words of the command that compiles C++: those of the variable CXX, such as "ccache g++", or g++."""
    return shlex.split(os.environ.get("CXX", "g++")) or [""]


@cache
def load_library(source: Path) -> ctypes.CDLL:
    """Load the shared library of a C++ file from the kernel folder. Compile it first if it is missing or damaged.

    The library's file name contains a digest of the sources, the compiler with its arguments, and the processor, so a
    library of another machine is never loaded. If `kernel_folder` returns None, every process compiles the library.
    Raises CannotCompile.
    """
    torch.get_num_threads()  # loads torch's OpenMP first, so that the library uses its threads
    command = compiler_command()
    if shutil.which(command[0]) is None:
        raise CannotCompile(f"no C++ compiler ({command[0]}) was found")
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    texts = (file.read_text() for file in (source, *HEADERS, *sorted(source.parent.glob("*.h"))))
    told = repr((*texts, FLAGS, command[1:], version, _processor()))
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    name = f"{source.stem}_{digest}.so"
    folder = kernel_folder(default_root())
    if folder is not None and (folder / name).is_file() and is_whole(folder / name):
        return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(prefix="compiled_engine_", dir=folder) as work:
        path = Path(work) / name
        done = subprocess.run(
            [*command, *FLAGS, f"-I{Path(__file__).parent}", "-o", str(path), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotCompile(f"{command[0]} cannot compile {source.name}: {done.stderr.strip()[-500:]}")
        if folder is not None:
            keep_digest(folder / name, path.read_bytes())
            path = path.replace(folder / name)
        return ctypes.CDLL(str(path))  # stays mapped after its file is deleted


def _processor() -> str:
    """Return the processor's model and instruction set extensions, which -march=native depends on, as text."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    told = {line.split(":")[0].strip(): line for line in lines}
    return "".join(told.get(key, "") for key in ("model name", "flags", "Features")) or platform.processor()


class CallRecorder(Protocol):
    """Interface of objects that record calls of CppFunctions. The context variable `recorder` holds the one in use."""

    def add_call(self, function: CppFunction, arguments: tuple[Any, ...]) -> None: ...


class CppFunction:
    """Calls the function `name` of the C++ file `source`, which returns nothing.

    types: the type of each argument: POINTER (an address or None), INTEGER (int64) or NUMBER (float32). The C++
    file must also define the function `name`_packed, see cpp_packed.h. Raises CannotCompile, see load_library.
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
        """Return the arguments as bytes, 64 bits each, as the function `name`_packed (`packed_entry`) reads them."""
        return struct.pack(self._packing, *(0 if argument is None else argument for argument in arguments))
