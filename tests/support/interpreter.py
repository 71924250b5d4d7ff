"""Processes that run kernels in Triton's interpreter, without a GPU, and the limits of the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from folders import SUPPORT
from triton.runtime import interpreter


def release(version: str) -> tuple[int, ...]:
    """3.6.0 -> (3, 6)"""
    return tuple(map(int, version.split(".")[:2]))


loops_to_a_loaded_bound = pytest.mark.skipif(
    release(triton.__version__) < (3, 9) and release(np.__version__) >= (2, 5),
    reason="the interpreter of Triton 3.6 cannot loop to a bound that was loaded with numpy 2.5",
)


def python_path(test_file: str) -> str:
    """PYTHONPATH of a process that imports the test file and the modules in this folder."""
    folders = [str(Path(test_file).parent), str(SUPPORT), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(folder for folder in folders if folder)  # an empty entry is the working directory


def interpreting(test_file: str) -> dict[str, str]:
    """The environment of a process that runs kernels of the test file in the interpreter."""
    return os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(test_file)}


def quicken() -> None:
    """Have the interpreter patch Triton's language once, and trust sums of integers; both take most of its time.

    It would patch for every call of a function in a kernel, and add in 64 bits too to see whether 32 are enough. A sum
    that overflows is wrong, which the reference shows.
    """
    patch, seen = interpreter._patch_lang, set[Any]()

    def patch_for(function: Any) -> Any:
        if function not in seen:
            seen.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_for
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
