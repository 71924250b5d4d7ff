"""How a pass declares its op: opaque to Inductor, with a kernel for GPUs and a reference for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("compiled_engine", "FRAGMENT")


def define_op(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define compiled_engine::<schema>, functional, and return the op. `fake` gives the results' shapes and dtypes.

    Straight into torch's dispatcher, which costs a few microseconds a call; torch.library.custom_op costs several
    times that.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"compiled_engine::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.compiled_engine, name).default
