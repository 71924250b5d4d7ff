"""Defines the passes' ops, and declares the properties of ops that passes and the compiler read.

`define_op` registers a pass's op, which is opaque to Inductor, with a kernel for GPUs and a reference for CPUs.
`declare_op` declares the properties of an op that ATen or a user has registered. Passes and the compiler look up
declarations instead of keeping lists of op names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
# Weight format: stored in the dtype it is multiplied in.
PLAIN = "plain"
# Weight format: stored as codes with scales, see LinearScheme.
QUANTISED = "quantised"
QUANTISED_PARAMETERS = ("scales_RC", "zeros_RC", "input_scale_1", "columns_1K")

_LIBRARY = torch.library.Library("compiled_engine", "FRAGMENT")
_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}


@dataclass(frozen=True)
class LinearArguments:
    """The arguments, by schema name, of an op that computes a linear: x @ weight^T + bias."""

    x: str
    weight: str
    bias: str | None = None
    format: str = PLAIN  # PLAIN, or QUANTISED: the op then also takes QUANTISED_PARAMETERS and scheme
    transposed: bool = False  # the op takes weight^T
    alone: tuple[tuple[str, Any], ...] = ()  # argument values with which the call is nothing but a linear


@dataclass(frozen=True)
class OpDeclaration:
    """Properties of an op: how passes match it as a linear, and how the compiler runs it."""

    direct: bool = False  # A piece with the op may run as generated Python: Inductor could do no more than call the op.
    call: Callable[..., Any] | None = None  # called by generated Python in place of the op, at less host time
    launches: bool = True  # a call launches kernels; False for views
    linear: LinearArguments | None = None  # set for an op that is a linear
    # Plain torch that Inductor compiles in place of the op on devices without its kernel.
    reference: Callable[..., Any] | None = None
    lone: bool = False  # `direct`, but only in a piece without ops that Inductor could fuse this one with


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
    """Register the functional op compiled_engine::<schema>, declare it as called without Inductor, and return it.

    cpu, cuda: the op's implementations per device. fake: returns tensors of the results' shapes and dtypes, for
    tracing; it takes all of the op's arguments, or some, by their names in the schema. reference, linear: see
    OpDeclaration. The op is registered directly in torch's dispatcher, where a call costs several microseconds;
    torch.library.custom_op costs several times that. `implementation` returns the function that generated code calls
    past the dispatcher.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    op: OpOverload = getattr(torch.ops.compiled_engine, name).default
    torch.library.register_fake(f"compiled_engine::{name}", _called_by_name(fake, op), lib=_LIBRARY)
    op.py_impl(_KEYS["cpu"])(cpu)
    op.py_impl(_KEYS["cuda"])(cuda)
    declare_op(op, OpDeclaration(direct=True, linear=linear, reference=reference))
    return op


def _called_by_name(function: Callable[..., Any], op: OpOverload) -> Callable[..., Any]:
    """Return a function of an op's arguments that calls `function` with those that it names.

    A function with parameters of other names is returned itself.
    """
    arguments, wanted = op._schema.arguments, inspect.signature(function).parameters
    if not wanted.keys() <= {argument.name for argument in arguments}:
        return function

    def call(*given: Any, **named: Any) -> Any:
        values = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        values |= {argument.name: value for argument, value in zip(arguments, given, strict=False)} | named
        return function(**{name: values[name] for name in wanted})

    return call


def declare_op(op: OpOverload, declaration: OpDeclaration) -> None:
    """Record an op's declaration (see OpDeclaration). Raises ValueError if the op already has a different one.

    `define_op` declares its ops itself.
    """
    if _DECLARED.setdefault(op, declaration) != declaration:
        raise ValueError(f"op is {op}, which is declared as {_DECLARED[op]}; allowed: one declaration of an op")


def declaration_of(op: object) -> OpDeclaration:
    """Return the declaration of an op. For an undeclared op, or for no torch op, it has only defaults."""
    return _DECLARED.get(op, _NOTHING) if isinstance(op, OpOverload) else _NOTHING


def references() -> dict[OpOverload, Callable[..., Any]]:
    """Return the reference, a function of plain torch ops, of each op that has one."""
    return {op: declared.reference for op, declared in _DECLARED.items() if declared.reference is not None}


def implementation(op: OpOverload, device_type: str) -> Callable[..., Any]:
    """Return the function that generated Python calls in place of an op on a device type.

    This is OpDeclaration.call, if the op's declaration has it. For an op from `define_op`, it is the implementation for
    the device type, called past torch's dispatcher. Any other op is returned itself.
    """
    return declaration_of(op).call or op.py_kernels.get(_KEYS[device_type], op)
