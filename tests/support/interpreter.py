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
from triton.language.semantic import TritonSemantic
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

    Each takes much of its time. It would patch for every call of a function in a kernel, add in 64 bits too to see
    whether 32 are enough (a sum that overflows is wrong, which the reference shows), and work out the type and the
    sizes of each value anew, and the types that an operation brings its operands to.
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
    remember_operands()
    interpreter._patch_attr, core._unwrap_if_constexpr = call_directly, unwrap
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


def remember_operands() -> None:
    """Cache what binary operations bring their operands to: types by the types of both, and numbers as blocks.

    Triton's own code decides, once for each pair of types. Blocks that have only to be repeated are repeated here.
    """

    def remembering(decide: Any) -> Any:
        found = dict[tuple[Any, ...], tuple[Any, Any]]()  # for each operand a value of its type; None: stays as it is

        def operands(semantic: Any, lhs: Any, rhs: Any, *settings: Any, **named: Any) -> tuple[Any, Any]:
            key = (
                lhs.type.name if type(lhs) is core.tensor else (type(lhs), repr(lhs)),
                rhs.type.name if type(rhs) is core.tensor else (type(rhs), repr(rhs)),
                settings,
                *named.items(),
            )
            if key not in found:
                made = decide(semantic, lhs, rhs, *settings, **named)
                found[key] = (None if made[0] is lhs else made[0], None if made[1] is rhs else made[1])
                return made
            left, right = found[key]
            return (
                lhs if left is None else brought(semantic, lhs, left),
                rhs if right is None else brought(semantic, rhs, right),
            )

        return operands

    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, remembering(getattr(TritonSemantic, name)))


def brought(semantic: Any, value: Any, kept: Any) -> Any:
    """Return the value with the type of `kept`, which is a number's block itself."""
    if type(value) is not core.tensor:
        return kept
    if value.dtype.name != kept.dtype.name:
        value = semantic.cast(value, kept.dtype)
        if value.type.name == kept.type.name:
            return value
    data = np.empty(kept.handle.data.shape, value.handle.data.dtype)
    data[...] = value.handle.data
    return core.tensor(interpreter.TensorHandle(data, value.handle.dtype), kept.type)


def unwrap(value: Any) -> Any:
    """Do what Triton's function does, with as little as possible for tensors and constants."""
    kind = type(value)
    if kind is core.tensor:
        return value
    return value.value if kind is core.constexpr else unwrap_others(value)


unwrap_others = core._unwrap_if_constexpr


def call_directly(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Patch one function of the language as the interpreter does, without copies of each call's arguments."""
    semantic = TritonSemantic(builder)
    function = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
        return function(*arguments, _semantic=semantic, **named)

    scope.set_attr(package, name, call)


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
    poison_as_asked()
