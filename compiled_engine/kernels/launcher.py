"""Launches Triton kernels in a few microseconds of host time, by caching Triton's analysis of each launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from compiled_engine.kernels.compile_ahead import KernelCollector
from compiled_engine.kernels.kernel_digest import digest_helpers_first

# Versions whose launches tests/kernels/test_launcher.py has verified to reach the driver as Triton's own do.
TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
POINTER_SUFFIX = "_ptr"
DESCRIPTOR_SUFFIX = "_desc"
# Options that quick launches support; a launch with other options is Triton's.
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")


def quick_launches(kernel: Any) -> Any:
    """Return a Launcher of a @triton.jit or @gluon.jit function. Used as a decorator.

    Returns the function unchanged under Triton's interpreter, for versions not in TRITON_VERSIONS, and on AMD GPUs,
    where a specialization depends on more than Launcher considers.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    known = version in TRITON_VERSIONS and torch.version.hip is None
    return Launcher(kernel) if known and isinstance(kernel, JITFunction) else kernel


class Launcher:
    """A JIT function that is launched with less host time. It is called as before: kernel[grid](*arguments, **options).

    Triton makes the first launch of each specialization, for which it compiles or loads the kernel. Later launches call
    the loaded kernel on the current stream. A specialization is determined by the device, the tensors' dtypes and
    alignment, Triton's own classification of numbers, the constexprs, and the options. While launch hooks are set,
    Triton makes all launches.

    - grid: a tuple of one to three numbers.
    - Parameters named ..._ptr take tensors that the GPU can read, or None. Their device is checked only at the first
      launch of a specialization.
    - Parameters named ..._desc take results of Box.of, or None.
    - Changes of Triton's knobs, and of globals that the kernel reads, have no effect after the first launch.
    - While kernels are compiled ahead, the thread whose launches KernelCollector skips launches nothing.
    """

    def __init__(self, jit_function: Any):
        self.jit_function = jit_function

    @cached_property
    def _launch(self) -> Callable[..., None]:
        return _launch_function(self.jit_function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit_function, name)


def _launch_function(jit_function: Any) -> Callable[..., None]:
    # The first specialization imports modules of triton's package. If one thread imports a module while another imports
    # its package, each waits for the other, and Python raises a deadlock error.
    import triton.experimental.gluon
    from triton.backends.compiler import BaseBackend
    from triton.runtime import driver
    from triton.runtime.jit import native_specialize_impl  # only in verified versions

    knobs = triton.knobs.runtime
    defaults = {f"_default_{p.name}": p.default for p in jit_function.params if p.has_default}
    namespace = defaults | {
        "_driver": driver,
        "_kernels": {},
        "_knobs": knobs,
        "_enter_hooks": knobs.launch_enter_hook,
        "_exit_hooks": knobs.launch_exit_hook,
        "_run_hooks": jit_function.pre_run_hooks,
        "_specialize": native_specialize_impl,
        "_backend": BaseBackend,
        "_KernelCollector": KernelCollector,
        "_by_triton": partial(_by_triton, jit_function),
    }
    exec(compile(launch_source(jit_function), f"<launch of {jit_function.__name__}>", "exec"), namespace)
    return namespace.pop("launch")


def launch_source(jit_function: Any) -> str:
    """Return Python source of a function launch(grid, <the kernel's parameters>, <options>).

    The function looks the compiled kernel up by a key. Launches with equal keys have the same specialization in Triton.
    The source is generated since a loop over the parameters would take longer than the rest of a launch.
    """
    names = [parameter.name for parameter in jit_function.params]
    parameters = [f"{p.name}=_default_{p.name}" if p.has_default else p.name for p in jit_function.params]
    pointers = [parameter.name for parameter in jit_function.params if _is_pointer(parameter)]
    arguments, options = ", ".join(names), ", ".join(OPTIONS)
    values = ", ".join(f"_{name}" if name in pointers else name for name in names)
    key = [_key_item(parameter) for parameter in jit_function.params]
    aligned = [f"_{p.name}" for p in jit_function.params if p.name in pointers and _specialized_on_alignment(p)]
    if aligned:
        each = ", ".join(f"{address} & 15 == 0" for address in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    unhooked = (
        "_knobs.launch_enter_hook is _enter_hooks and _knobs.launch_exit_hook is _exit_hooks "
        "and not (_enter_hooks.calls or _exit_hooks.calls or _run_hooks) "
        "and _knobs.jit_cache_hook.__class__ is not _KernelCollector"
    )
    lines = [
        f"def launch(_grid, {', '.join(parameters)}, *, {'=None, '.join(OPTIONS)}=None, **_others):",
        *(f"_{name} = 0 if {name} is None else {name}.data_ptr()" for name in pointers),
        "_active = _driver.active",
        "_device = _active.get_current_device()",
        f"_key = (_device, {', '.join(key)}, {options})",
        "_kernel = _kernels.get(_key)",
        f"if _kernel is not None and not _others and {unhooked}:",
        "    _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1, 1)[:3]",
        "    _run, _function, _metadata, _ = _kernel",
        "    _stream = _active.get_current_stream(_device)",
        f"    _run(_x, _y, _z, _stream, _function, _metadata, None, None, None, {values})",
        "else:",
        f"    _kernel = _by_triton(_grid, ({arguments},), ({options},), _others)",
        "    if _kernel is not None and not _others:",
        "        _kernels[_key] = _kernel",
    ]
    return "\n    ".join(lines) + "\n"


def _key_item(parameter: Any) -> str:
    """Return Python source of the item of the lookup key that stands for the argument of this parameter.

    A tensor's alignment is not part of this item.
    """
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if _is_pointer(parameter):
        return f"None if {name} is None else {name}.dtype"
    if name.endswith(DESCRIPTOR_SUFFIX):
        return f"None if {name} is None else ({name}.box, {name}.base.dtype)"
    specialized, align = not parameter.do_not_specialize, _specialized_on_alignment(parameter)
    asked = f"_specialize(_backend, {name}, {parameter.is_const}, {specialized}, {align})"
    return asked if specialized else f"{name}.__class__ is int and -0x80000000 <= {name} <= 0x7fffffff or {asked}"


def _is_pointer(parameter: Any) -> bool:
    return parameter.name.endswith(POINTER_SUFFIX) and not parameter.is_constexpr


def _specialized_on_alignment(parameter: Any) -> bool:
    return not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)


def leaves_out_launches() -> bool:
    """Return whether kernels that this thread launches are only compiled, so that memory for results is not written."""
    hook = triton.knobs.runtime.jit_cache_hook
    return isinstance(hook, KernelCollector) and hook.leaves_out_launches()


def _by_triton(
    jit_function: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    options: tuple[Any, ...],
    others: dict[str, Any],
) -> tuple[Any, ...] | None:
    """Launch through Triton, and return (run function, CUDA function, packed metadata, kernel) for later launches.

    The kernel is returned to keep a reference to it, without which it would be unloaded. Returns None if a hook
    prevented the compilation. options: values of OPTIONS, in that order. others: further options, by name.
    """
    given = {name: value for name, value in zip(OPTIONS, options, strict=True) if value is not None}
    if not isinstance(triton.knobs.runtime.jit_cache_hook, KernelCollector):  # it digests them, one thread at a time
        digest_helpers_first(jit_function)
    kernel = jit_function.run(*arguments, grid=grid, warmup=leaves_out_launches(), **given, **others)
    return None if kernel is None else (kernel.run, kernel.function, kernel.packed_metadata, kernel)
