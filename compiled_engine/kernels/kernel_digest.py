"""Computes the digests by which Triton names the binaries of kernels, in an order that makes the names stable.

Triton 3.6 includes a global that a helper function reads in the kernel's digest only if the helper was digested before
the kernel. Processes that digest in different orders would name the same kernel differently, and would not find the
binaries that workers have compiled. Helpers are therefore digested first; Triton does so itself from 3.9 on.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def digest_helpers_first(jit_function: Any) -> None:
    """Compute the digests of the JIT functions that a kernel calls, recursively, and then the kernel's own digest.

    The digests are kept in the functions; existing digests stay. Threads may call this function concurrently if all
    digests are computed through it.
    """
    _digest(jit_function, set())


def _digest(function: Any, seen: set[int]) -> None:
    if id(function) in seen:  # a function that calls itself
        return
    seen.add(id(function))
    if function.hash is None or function.hash.startswith("recursion:"):  # marker of a digest in progress in a thread
        for helper in _helpers(function):
            _digest(helper, seen)
    function.cache_key  # noqa: B018 - a property that computes and keeps the digest


def _helpers(function: Any) -> list[Any]:
    """Return the JIT functions that a function refers to, as globals, closure variables or attributes of modules."""
    from triton.runtime.jit import JITCallable  # not installed everywhere

    names, scope = function.fn.__code__.co_names, function.get_capture_scope()
    names = (*names, *function.fn.__code__.co_freevars)
    named = [scope[name] for name in names if name in scope]
    modules = [value for value in named if isinstance(value, ModuleType)]
    members = [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    return [value for value in (*named, *members) if isinstance(value, JITCallable)]
