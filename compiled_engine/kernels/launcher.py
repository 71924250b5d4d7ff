"""Launches of Triton kernels that take the host a few microseconds: what Triton finds out at each of them is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from compiled_engine.kernels.compile_ahead import KernelCollector
from compiled_engine.kernels.kernel_digest import digest_helpers_first

# Versions for which tests/kernels/test_launcher.py has verified that launches reach the driver as Triton's own do.
TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
POINTER_SUFFIX = "_ptr"
DESCRIPTOR_SUFFIX = "_desc"
# Options that a launch may have; one with others is Triton's.
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")


def quick_launches(kernel: Any) -> Any:
    """A decorator above @triton.jit: the same kernel, see Launcher.

    It is what was decorated under Triton's interpreter, with a Triton that is not one of TRITON_VERSIONS, and for AMD's
    GPUs, where a specialization has more to it.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    known = version in TRITON_VERSIONS and torch.version.hip is None
    return Launcher(kernel) if known and isinstance(kernel, JITFunction) else kernel


class Launcher:
    """Launch kernel[grid](*arguments, **options) like a JIT function, with the same attributes.

    The first launch of each specialization is Triton's, which compiles the kernel or finds it; later ones call the
    compiled kernel on the current stream. A specialization follows from the device, from dtypes and alignment of
    tensors, from what Triton's own function says of numbers, from constexprs and options. While Triton's
    launches are hooked they are Triton's.

    grid: a tuple of one to three numbers. Parameters named ..._ptr take tensors that the GPU can read, or None: where
    they are is checked at the first launch alone. Those named ..._desc take what Box.of makes, or None. Triton's knobs,
    and globals that the kernel reads, are those of the first launch. Nothing is launched for a thread whose launches
    KernelCollector leaves out.
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
    # The first specialization imports modules of this package. A thread that imports a module before its package, while
    # another thread imports the package, waits for it, as that one does for the module: Python calls it a deadlock.
    import triton.experimental.gluon
    from triton.backends.compiler import BaseBackend
    from triton.runtime import driver
    from triton.runtime.jit import native_specialize_impl  # only verified versions have it

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
    """Python source of launch(grid, <the kernel's parameters>, <options>).

    It is generated because a loop over parameters takes longer than all that it does. Equal keys are equal
    specializations to Triton.
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
    """Return the part of an argument that its kernel depends on, alignment of tensors aside."""
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
    hook = triton.knobs.runtime.jit_cache_hook
    left_out = isinstance(hook, KernelCollector) and hook.leaves_out_launches()
    if not isinstance(hook, KernelCollector):  # which does so, one thread at a time
        digest_helpers_first(jit_function)
    kernel = jit_function.run(*arguments, grid=grid, warmup=left_out, **given, **others)
    return None if kernel is None else (kernel.run, kernel.function, kernel.packed_metadata, kernel)
