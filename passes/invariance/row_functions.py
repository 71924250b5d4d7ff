"""Defines the functions of elements and of rows that batch-invariant engines do not leave to Inductor and the library.

kernels/element_functions.py computes them. Functions of rows are replaced on every device. Functions of elements are
replaced on a CPU alone: there whole vectors are computed by other instructions than single elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.kernels.element_functions import FUNCTIONS, silu, softmax, sum_in_halves
from compiled_engine.passes.framework.matching import arg, aten, emit, is_call, named
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear.silu_mul import silu_mul

# Ops of ATen that have no arguments but the elements -> the function that computes them.
_OF_ELEMENTS = {
    aten.exp.default: "exp",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.softplus.default: "softplus",
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(x: torch.Tensor, function: str) -> torch.Tensor:
    """Return the function named `function` of each element."""
    return FUNCTIONS[function](x)


def row_reference(x_TN: torch.Tensor, function: str) -> torch.Tensor:
    """Return the softmax of each row of N elements, [T, N], or with function "sum" or "mean" one number, [T, 1].

    With function "gated_silu", return silu(first half) * second half of each row, [T, N / 2]. Elements in 16 bits are
    added in float32, as PyTorch adds them, and the result is rounded.
    """
    if x_TN.dtype != torch.float32:
        return row_reference(x_TN.float(), function).to(x_TN.dtype)
    if function == "softmax":
        return softmax(x_TN)
    if function == "gated_silu":
        gate_TI, up_TI = x_TN.chunk(2, dim=-1)
        return silu(gate_TI) * up_TI
    total_T1 = sum_in_halves(x_TN, -1).unsqueeze(-1)
    return total_T1 / x_TN.shape[-1] if function == "mean" else total_T1


def _width(width: int, function: str) -> int:
    return {"softmax": width, "gated_silu": width // 2}.get(function, 1)


element_function = define_op(
    "element_function(Tensor x, str function) -> Tensor",
    cpu=reference,
    cuda=reference,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
)
row_function = define_op(
    "row_function(Tensor x_TN, str function) -> Tensor",
    cpu=row_reference,
    cuda=row_reference,
    fake=lambda x_TN, function: x_TN.new_empty((*x_TN.shape[:-1], _width(x_TN.shape[-1], function))),
)


def replaced(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Replace a call that computes one of the functions, and return the new node; None for other nodes.

    Functions of elements must be in float32, and those of rows in the dtype of their elements.
    """
    value = node.meta.get("val")
    is_call_of_values = node.op == "call_function" and bool(node.args) and isinstance(node.args[0], fx.Node)
    if not is_call_of_values or not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
        return None
    target: Any = node.target
    given = arg(node, 0).meta["val"]
    if node.kwargs or not isinstance(given, torch.Tensor) or given.dtype != value.dtype:
        return None
    x, on_cpu = arg(node, 0), value.device.type == "cpu" and value.dtype == torch.float32
    of_row = _of_row(node)
    with graph.inserting_before(node):
        if on_cpu and target in _OF_ELEMENTS and len(node.args) == 1:
            new = emit(graph, element_function, x, _OF_ELEMENTS[target])
        elif on_cpu and is_call(node, aten.pow.Tensor_Scalar) and arg(node, 1) == 2:
            new = emit(graph, aten.mul.Tensor, x, x)
        elif on_cpu and is_call(node, silu_mul) and named(node)["activation"] == "silu":
            new = emit(graph, row_function, x, "gated_silu")
        elif of_row is not None:
            new = emit(graph, row_function, x, of_row)
            if value.dim() < given.dim():
                new = emit(graph, aten.squeeze.dim, new, -1)
        else:
            return None
    node.replace_all_uses_with(new)
    return new


def _of_row(node: fx.Node) -> str | None:
    """Return the name of the function of rows, of the last dimension, that a call computes; None for other calls."""
    if is_call(node, aten._softmax.default):
        return "softmax" if arg(node, 1) in (-1, node.meta["val"].dim() - 1) and not arg(node, 2) else None
    if not is_call(node, aten.sum.dim_IntList, aten.mean.dim):
        return None
    last = arg(node, 0).meta["val"].dim() - 1
    name = "sum" if is_call(node, aten.sum.dim_IntList) else "mean"
    return name if list(arg(node, 1)) in ([-1], [last]) else None
