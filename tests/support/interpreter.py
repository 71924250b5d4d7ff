"""Processes that run kernels in Triton's interpreter, without a GPU, and the limits of the interpreter."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from folders import SUPPORT
from poison import poison_as_asked
from triton.language import core
from triton.runtime import interpreter


def release(version: str) -> tuple[int, ...]:
    """Return a version as numbers: (3, 6) for 3.6.0."""
    return tuple(map(int, version.split(".")[:2]))


loops_to_a_loaded_bound = pytest.mark.skipif(
    release(triton.__version__) < (3, 9) and release(np.__version__) >= (2, 5),
    reason="the interpreter of Triton 3.6 cannot loop to a bound that was loaded with numpy 2.5",
)


def python_path(test_file: str) -> str:
    """Return PYTHONPATH for a process that imports the test file and the modules in this folder."""
    folders = [str(Path(test_file).parent), str(SUPPORT), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(folder for folder in folders if folder)  # an empty entry is the working directory


def interpreting(test_file: str) -> dict[str, str]:
    """Return the environment of a process that runs kernels of the test file in the interpreter."""
    return os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(test_file)}


def quicken() -> None:
    """Have the interpreter patch Triton's language once, trust sums of integers, and remember the types of blocks.

    All three take most of its time. It would patch for every call of a function in a kernel, add in 64 bits too to see
    whether 32 are enough (a sum that overflows is wrong, which the reference shows), and work out the type and the
    sizes of each value anew.
    """
    patch, seen = interpreter._patch_lang, set[Any]()

    def patch_for(function: Any) -> Any:
        if function not in seen:
            seen.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_for
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    remember_types()
    gc.set_threshold(100_000)


def remember_types() -> None:
    """Cache the types of the interpreter's blocks by element type and shape, and the sizes of values by type."""
    make_type, make_value, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types, sizes, numpy_types = dict[Any, dict[str, Any]](), dict[str, dict[str, Any]](), dict[str, Any]()

    def type_made(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(types[key], element_ty=element_ty)

    def value_made(self: Any, handle: Any, type: Any) -> None:
        if type.name not in sizes:
            make_value(self, handle, type)
            sizes[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
        vars(self).update(sizes[type.name], handle=handle, type=type, dtype=type.scalar)

    def numpy_type_of(element_ty: Any) -> Any:
        if element_ty.name not in numpy_types:
            numpy_types[element_ty.name] = numpy_type(element_ty)
        return numpy_types[element_ty.name]

    core.block_type.__init__, core.tensor.__init__ = type_made, value_made
    interpreter._get_np_dtype = numpy_type_of


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
    poison_as_asked()
