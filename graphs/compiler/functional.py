"""Lowers Dynamo's graph to a functional ATen graph, also if the traced code mutates tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.graphs.compiler import compat


def to_aten(graph: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
    """Return the ATen graph for Dynamo's graph. In it, only attention ops write to their arguments.

    fakes: the fake values of the graph's inputs.
    """
    _simplify_products(graph)
    _write_out_polar(graph)
    module = make_fx(graph)(*fakes)
    if any(map(_writes, module.graph.nodes)):
        return make_fx(compat.functional(graph))(*fakes)
    return module


def write_out_constants(module: fx.GraphModule) -> None:
    """Replace constants that are scalar tensors by calls of aten.full, in place. Call it outside fake modes.

    Tracing turns NumPy scalars into such constants.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, str(node.target))
        if constant.dim() == 0:
            number = constant.item()
            keywords = {"dtype": constant.dtype, "device": constant.device, "pin_memory": False}
            with module.graph.inserting_before(node):
                new = module.graph.call_function(torch.ops.aten.full.default, ([], number), keywords)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)


def _simplify_products(graph: fx.GraphModule) -> None:
    """Rewrite matrix products that torch 2.11 cannot trace with symbolic sizes, in place.

    A linear over a batch of one, [1, T, D] or [1, 1, T, D], becomes one over [T, D]. A matrix product whose inner
    dimension has size one, such as that of rotary frequencies and positions, becomes an elementwise multiplication with
    broadcasting. A matrix product or linear of [N, P, D] and a weight becomes one of [N * P, D].
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear):
        shape = _shape(node.args[0])
        if len(shape) == 3 and isinstance(shape[0], int) and shape[0] == 1:
            _multiply_rows(graph.graph, node, ("squeeze", 0), ("unsqueeze", 0))
        elif len(shape) == 4 and all(isinstance(size, int) and size == 1 for size in shape[:2]):
            _multiply_rows(graph.graph, node, ("flatten", 0, 2), ("unflatten", 0, (1, 1, -1)))
        elif _has_open_batch(shape):
            _multiply_rows(graph.graph, node, ("flatten", 0, 1), ("unflatten", 0, (-1, shape[1])))
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (operator.matmul, torch.matmul):
            left, right = map(_shape, node.args)
            if len(left) == len(right) > 1 and isinstance(left[-1], int) and left[-1] == 1:
                node.target = operator.mul
            elif len(right) == 2 and _has_open_batch(left):
                _multiply_rows(graph.graph, node, ("flatten", 0, 1), ("unflatten", 0, (-1, left[1])))
    graph.recompile()


def _write_out_polar(graph: fx.GraphModule) -> None:
    """Replace torch.polar by view_as_complex of its parts, in place: torch 2.11 cannot trace it with symbolic sizes."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.polar):
        given: dict[str, Any] = dict(zip(("abs", "angle"), node.args, strict=False)) | node.kwargs
        length, angle = given["abs"], given["angle"]
        with graph.graph.inserting_before(node):
            parts = [graph.graph.call_function(function, (angle,)) for function in (torch.cos, torch.sin)]
            if length.target is not torch.ones_like or length.args[:1] != (angle,):
                parts = [graph.graph.call_function(torch.mul, (length, part)) for part in parts]
            pair = graph.graph.call_function(torch.stack, (parts, -1))
        node.target, node.args, node.kwargs = torch.view_as_complex, (pair,), {}
    graph.recompile()


def _has_open_batch(shape: torch.Size) -> bool:
    return len(shape) == 3 and isinstance(shape[1], int) and not isinstance(shape[0], int)


def _multiply_rows(graph: fx.Graph, node: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Make a matrix product read a view of its first argument, and make its users read a view of its result.

    before, after: method and arguments of the view of the first argument, and of the result.
    """
    with graph.inserting_before(node):
        rows = graph.call_method(before[0], (node.args[0], *before[1:]))
    node.update_arg(0, rows)
    with graph.inserting_after(node):
        batch = graph.call_method(after[0], (node, *after[1:]))
    batch.meta = dict(node.meta)  # the next product may read it
    node.replace_all_uses_with(batch, delete_user_cb=lambda user: user is not batch)


def _shape(node: Any) -> torch.Size:
    return node.meta["example_value"].shape


def _writes(node: fx.Node) -> bool:
    target = node.target
    mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutates and target.name() not in ATTENTION_OPS  # type: ignore[union-attr]
