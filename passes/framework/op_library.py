"""Declares ops: what computes an op on each kind of device, and what passes and the compiler may know of it.

An op of a pass is opaque to Inductor, with a kernel for GPUs and a reference for CPUs (`define_op`). An op that was
registered elsewhere, by ATen or by a user, is declared by `declare_op`. Passes and compiler read declarations; neither
has a list of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
# The format of a weight that is stored as it is multiplied.
PLAIN = "plain"
# The format of a weight that is stored as codes with scales, see LinearScheme.
QUANTISED = "quantised"

_LIBRARY = torch.library.Library("compiled_engine", "FRAGMENT")
_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}


@dataclass(frozen=True)
class LinearArguments:
    """The arguments of an op that computes x @ weight^T + bias, by their names in its schema.

    transposed: the op takes weight^T. format: how the weight is stored; an op that takes a quantised one has further
    arguments scales_RC, zeros_RC, input_scale_1 and scheme. alone: arguments with the values that they have where the
    call computes a linear and nothing else.
    """

    x: str
    weight: str
    bias: str | None = None
    format: str = PLAIN
    transposed: bool = False
    alone: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class OpDeclaration:
    """direct: a piece with the op may run as generated Python, since Inductor could only call the op too. call: the
    function that this Python calls in place of the op, which costs the host less. launches: whether a call launches
    anything; a view does not. linear: the arguments of an op that is a linear. reference: plain torch that Inductor
    compiles in place of the op on a device without its kernel. lone: as direct, in a piece that has nothing else which
    Inductor could fuse the op with."""

    direct: bool = False
    call: Callable[..., Any] | None = None
    launches: bool = True
    linear: LinearArguments | None = None
    reference: Callable[..., Any] | None = None
    lone: bool = False


def _view(call: Callable[..., Any] | None = None) -> OpDeclaration:
    return OpDeclaration(direct=True, call=call, launches=False)


_NOTHING = OpDeclaration()
# Grows when a module that defines ops is imported, as torch's own table does.
_DECLARED: dict[OpOverload, OpDeclaration] = {
    aten.mm.default: OpDeclaration(True, torch.mm, linear=LinearArguments("self", "mat2", transposed=True)),
    aten.addmm.default: OpDeclaration(
        True,
        torch.addmm,
        linear=LinearArguments("mat1", "mat2", "self", transposed=True, alone=(("alpha", 1), ("beta", 1))),
    ),
    aten.embedding.default: OpDeclaration(True, torch.embedding),
    aten.empty_like.default: OpDeclaration(True, torch.empty_like, launches=False),
    aten.add.Tensor: OpDeclaration(call=torch.add, lone=True),
    aten.cat.default: OpDeclaration(call=torch.cat, lone=True),
    aten.view.default: _view(torch.Tensor.view),
    aten.view.dtype: _view(),
    aten.t.default: _view(torch.t),
    aten.transpose.int: _view(torch.transpose),
    aten.reshape.default: _view(torch.reshape),
    aten.unsqueeze.default: _view(torch.unsqueeze),
    aten.squeeze.default: _view(),
    aten.squeeze.dim: _view(),
    aten.squeeze.dims: _view(),
    aten.slice.Tensor: _view(),
    aten.split.Tensor: _view(),
    aten.split.sizes: _view(),
    aten.split_with_sizes.default: _view(torch.split_with_sizes),
}


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    linear: LinearArguments | None = None,
) -> OpOverload:
    """Define compiled_engine::<schema>, functional, and return the op. `fake` gives the results' shapes and dtypes;
    reference, linear: see OpDeclaration.

    Straight into torch's dispatcher, which costs several microseconds a call; torch.library.custom_op costs several
    times that. See `implementation` for calls that go past it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"compiled_engine::{name}", fake, lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.compiled_engine, name).default
    op.py_impl(_KEYS["cpu"])(cpu)
    op.py_impl(_KEYS["cuda"])(cuda)
    declare_op(op, OpDeclaration(direct=True, linear=linear, reference=reference))
    return op


def declare_op(op: OpOverload, declaration: OpDeclaration) -> None:
    """Declare an op that was not made by `define_op`. Raises ValueError if it is declared otherwise already."""
    if _DECLARED.setdefault(op, declaration) != declaration:
        raise ValueError(f"op is {op}, which is declared as {_DECLARED[op]}; allowed: one declaration of an op")


def declaration_of(op: object) -> OpDeclaration:
    """The declaration of an op, or of a call's target; an empty one for anything that was never declared."""
    return _DECLARED.get(op, _NOTHING) if isinstance(op, OpOverload) else _NOTHING


def references() -> dict[OpOverload, Callable[..., Any]]:
    """Each op that has a reference, with it."""
    return {op: declared.reference for op, declared in _DECLARED.items() if declared.reference is not None}


def implementation(op: OpOverload, device_type: str) -> Callable[..., Any]:
    """The function that generated Python calls for an op on a kind of device, past torch's dispatcher where that is
    possible; the op itself if it was neither made by `define_op` nor declared with a `call`."""
    return declaration_of(op).call or op.py_kernels.get(_KEYS[device_type], op)
