"""Defines the functions of elements and of rows that batch-invariant engines do not leave to Inductor and the library.

kernels/element_functions.py computes them. Functions of rows are replaced on every device. Functions of elements are
replaced on a CPU alone: there whole vectors are computed by other instructions than single elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.kernels.element_functions import FUNCTIONS, softmax, sum_in_halves
from compiled_engine.passes.framework.matching import arg, aten, emit, is_call
from compiled_engine.passes.framework.op_library import define_op

# Ops of ATen that have no arguments but the elements -> the function that computes them.
_OF_ELEMENTS = {
    aten.exp.default: "exp",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.softplus.default: "softplus",
}


def reference(x: torch.Tensor, function: str) -> torch.Tensor:
    """Return the function named `function` of each element."""
    return FUNCTIONS[function](x)


def row_reference(x_TN: torch.Tensor, function: str) -> torch.Tensor:
    """Return the softmax of each row of N elements, [T, N], or with function "sum" its sum, [T, 1]."""
    return softmax(x_TN) if function == "softmax" else sum_in_halves(x_TN, -1).unsqueeze(-1)


element_function = define_op(
    "element_function(Tensor x, str function) -> Tensor",
    cpu=reference,
    cuda=reference,
    fake=lambda x, function: torch.empty_like(x, memory_format=torch.contiguous_format),
)
row_function = define_op(
    "row_function(Tensor x_TN, str function) -> Tensor",
    cpu=row_reference,
    cuda=row_reference,
    fake=lambda x, function: x.new_empty((*x.shape[:-1], x.shape[-1] if function == "softmax" else 1)),
)


def replaced(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Replace a call that computes one of the functions in float32, and return the new node; None for other nodes."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return None
    target: Any = node.target
    of_element = _OF_ELEMENTS.get(target) if value.device.type == "cpu" and len(node.args) == 1 else None
    of_row = None if of_element is not None else _of_row(node)
    if of_element is None and of_row is None:
        return None
    x = arg(node, 0)
    if node.kwargs or x.meta["val"].dtype != torch.float32:
        return None
    with graph.inserting_before(node):
        if of_element is not None:
            new = emit(graph, element_function, x, of_element)
        else:
            new = emit(graph, row_function, x, of_row)
            if value.dim() < new.meta["val"].dim():
                new = emit(graph, aten.squeeze.dim, new, -1)
    node.replace_all_uses_with(new)
    return new


def _of_row(node: fx.Node) -> str | None:
    """Return the name of the function of rows, of the last dimension, that a call computes; None for other calls."""
    if is_call(node, aten._softmax.default):
        return "softmax" if arg(node, 1) in (-1, node.meta["val"].dim() - 1) and not arg(node, 2) else None
    if is_call(node, aten.sum.dim_IntList):
        last = arg(node, 0).meta["val"].dim() - 1
        return "sum" if list(arg(node, 1)) in ([-1], [last]) else None
    return None
