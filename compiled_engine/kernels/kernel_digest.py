"""Digests of Triton kernels, under which Triton stores their binaries.

Triton 3.6 mixes the values of globals that a helper reads into a kernel's digest only if the helper has been digested
before, so equal kernels had different names in processes that digest them in a different order: workers compiled
kernels that no later start looked for. Helpers are digested first here. Versions from 3.9 on do so themselves.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def digest_helpers_first(jit_function: Any) -> None:
    """Digest a kernel after the functions that it calls, these in the same way. Does nothing if the kernel has been.

    Threads may do so at the same time, if all digest kernels through this function.
    """
    _digest(jit_function, set())


def _digest(function: Any, seen: set[int]) -> None:
    if id(function) in seen:  # a function that calls itself
        return
    seen.add(id(function))
    if function.hash is None or function.hash.startswith("recursion:"):  # another thread is at it
        for helper in _helpers(function):
            _digest(helper, seen)
    function.cache_key  # noqa: B018 - a property that keeps its value


def _helpers(function: Any) -> list[Any]:
    """The JIT functions among the globals that a function names, and among attributes that it names of modules."""
    from triton.runtime.jit import JITCallable  # not installed everywhere

    names, scope = function.fn.__code__.co_names, function.get_capture_scope()
    names = (*names, *function.fn.__code__.co_freevars)
    named = [scope[name] for name in names if name in scope]
    modules = [value for value in named if isinstance(value, ModuleType)]
    members = [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    return [value for value in (*named, *members) if isinstance(value, JITCallable)]
