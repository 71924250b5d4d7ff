"""Launches of Triton kernels that take the host a few microseconds: what Triton finds out at each of them is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction

# Of each, tests/test_launcher.py has shown that what follows here reaches the driver as Triton's own launches do.
TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
POINTER_SUFFIX = "_ptr"
# Options that a launch may have; one with others is Triton's.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


def quick_launches(kernel: Any) -> Any:
    """A decorator above @triton.jit: the same kernel, see Launcher.

    Under Triton's interpreter, and with a Triton that is not one of TRITON_VERSIONS, it is what was decorated.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    quick = isinstance(kernel, JITFunction) and version in TRITON_VERSIONS
    return Launcher(kernel) if quick else kernel


class Launcher:
    """kernel[grid](*arguments, **options) like a JIT function, whose attributes this has as well.

    The first launch of each specialization is Triton's, which compiles the kernel or finds it; later ones call the
    compiled kernel on the current stream. A specialization follows from the device, from dtypes and alignment of
    tensors, from what Triton's own function says of numbers, from constexprs and options. As long as anybody has
    hooked Triton's launches they are Triton's.

    grid: a tuple of one to three numbers. Parameters named ..._ptr take tensors that the GPU can read, or None: where
    they are is checked at the first launch alone. Triton's knobs, and globals that the kernel reads, are those of the
    first launch.
    """

    def __init__(self, jit_function: Any):
        self.jit_function = jit_function
        self._launch = _launch_function(jit_function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit_function, name)


def _launch_function(jit_function: Any) -> Callable[..., None]:
    from triton.backends.compiler import BaseBackend
    from triton.runtime import driver
    from triton.runtime.jit import native_specialize_impl  # no other version is known to have it

    knobs = triton.knobs.runtime
    namespace = {
        "_driver": driver,
        "_kernels": {},
        "_knobs": knobs,
        "_enter_hooks": knobs.launch_enter_hook,
        "_exit_hooks": knobs.launch_exit_hook,
        "_run_hooks": jit_function.pre_run_hooks,
        "_specialize": native_specialize_impl,
        "_backend": BaseBackend,
        "_by_triton": partial(_by_triton, jit_function),
    }
    exec(compile(launch_source(jit_function), f"<launch of {jit_function.__name__}>", "exec"), namespace)
    return namespace["launch"]


def launch_source(jit_function: Any) -> str:
    """Python source of launch(grid, <the kernel's parameters>, <options>).

    It is generated because a loop over parameters takes longer than all that it does. Equal keys are equal
    specializations to Triton.
    """
    addresses, key, aligned, values = [], [], [], []
    for parameter in jit_function.params:
        name = parameter.name
        to_align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if parameter.is_constexpr:
            key.append(name)
        elif name.endswith(POINTER_SUFFIX):
            addresses.append(f"_{name} = 0 if {name} is None else {name}.data_ptr()")
            key.append(f"None if {name} is None else {name}.dtype")
            aligned += [f"_{name}"] if to_align else []
        else:
            key.append(
                f"_specialize(_backend, {name}, {parameter.is_const}, {not parameter.do_not_specialize}, {to_align})"
            )
        values.append(f"_{name}" if name.endswith(POINTER_SUFFIX) else name)
    if aligned:
        each = ", ".join(f"{address} & 15 == 0" for address in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    parameters = ", ".join(parameter.name for parameter in jit_function.params)
    options = ", ".join(OPTIONS)
    unhooked = (
        "_knobs.launch_enter_hook is _enter_hooks and _knobs.launch_exit_hook is _exit_hooks "
        "and not (_enter_hooks.calls or _exit_hooks.calls or _run_hooks)"
    )
    lines = [
        f"def launch(_grid, {parameters}, *, {', '.join(f'{option}=None' for option in OPTIONS)}, **_others):",
        *addresses,
        "_active = _driver.active",
        "_device = _active.get_current_device()",
        f"_key = (_device, {', '.join(key)}, {options})",
        "_kernel = _kernels.get(_key)",
        f"if _kernel is not None and not _others and {unhooked}:",
        "    _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1, 1)[:3]",
        "    _run, _function, _metadata, _ = _kernel",
        "    _stream = _active.get_current_stream(_device)",
        f"    _run(_x, _y, _z, _stream, _function, _metadata, None, None, None, {', '.join(values)})",
        "else:",
        f"    _kernel = _by_triton(_grid, ({parameters},), ({options},), _others)",
        "    if _kernel is not None and not _others:",
        "        _kernels[_key] = _kernel",
    ]
    return "\n    ".join(lines) + "\n"


def _by_triton(
    jit_function: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    options: tuple[Any, ...],
    others: dict[str, Any],
) -> tuple[Any, ...] | None:
    """Launch as Triton does. What CompiledKernel.run needs, and the kernel, which is unloaded with its last reference;
    None if a hook kept it from being compiled."""
    given = {name: value for name, value in zip(OPTIONS, options, strict=True) if value is not None}
    kernel = jit_function.run(*arguments, grid=grid, warmup=False, **given, **others)
    return None if kernel is None else (kernel.run, kernel.function, kernel.packed_metadata, kernel)
