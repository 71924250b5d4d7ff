"""How a pass declares its op: opaque to Inductor, with a kernel for GPUs and a reference for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("compiled_engine", "FRAGMENT")
_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}


def define_op(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define compiled_engine::<schema>, functional, and return the op. `fake` gives the results' shapes and dtypes.

    Straight into torch's dispatcher, which costs several microseconds a call; torch.library.custom_op costs several
    times that. See `implementation` for calls that go past it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"compiled_engine::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.compiled_engine, name).default
    op.py_impl(_KEYS["cpu"])(cpu)
    op.py_impl(_KEYS["cuda"])(cuda)
    return op


def implementation(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """The function behind an op on a kind of device, for callers that need nothing of torch's dispatcher; the op itself
    if it was not made by `define_op`."""
    return op.py_kernels.get(_KEYS[device_type], op)
