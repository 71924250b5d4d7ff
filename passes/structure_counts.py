"""Counts what a graph is made of, before any pass has changed it.

Each count looks for the least that a pattern cannot be without, not for the pattern: what a pass
does not know counts as well, and then the pass falls short of its contract and says why.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.value_op import ATTENTION, ATTENTION_VALUE
from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.matching import (
    ACTIVATIONS,
    arg,
    aten,
    factors,
    is_call,
    only_user,
    through_cast,
)
from compiled_engine.passes.structure import Structure

_LINEARS = (aten.mm.default, aten.addmm.default)
# What may stand between an angle and a query or key that it turns.
_TURNING = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.cat.default, aten.stack.default)
_VIEWS = (
    *(aten.slice.Tensor, aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten._to_copy.default),
    *(aten.clone.default, aten.expand.default, aten.alias.default, aten.permute.default, aten.transpose.int),
)


def structure_of(graph: fx.Graph) -> Structure:
    """Of a graph of ATen ops as it was traced, or lowered."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    roots = [node for node in calls if is_call(node, aten.rsqrt.default) and _of_tokens(node)]
    centred = [node for node in roots if is_call(_normed(node), aten.sub.Tensor)]
    norms = [node for node in roots if node not in centred]
    readers: dict[fx.Node, int] = {}
    for linear in filter(_is_linear, calls):
        readers[arg(linear, -2)] = readers.get(arg(linear, -2), 0) + 1
    sums = [node for node in norms if _is_sum(_normed(node))]
    inner = [node for node in sums if any(_is_norm(addend) for addend in _normed(node).all_input_nodes)]
    attentions = [node for node in calls if is_call(node, ATTENTION)]
    return Structure(
        batched_values=sum(map(has_batch, calls)),
        attention_values=sum(1 for node in calls if is_call(node, ATTENTION_VALUE)),
        derived_parameters=sum(1 for node in calls if is_derivation(node)),
        linear_inputs=len(readers),
        linear_groups=sum(1 for count in readers.values() if count > 1),
        sum_norms=len(sums),
        inner_norms=len(inner),
        norms=len(norms) - len(sums) - len(inner),
        layer_norms=len(centred) + sum(1 for node in calls if _is_layer_norm(node)),
        angles=sum(1 for node in calls if is_call(node, aten.cos.default)),
        turned_attentions=sum(1 for node in attentions if _is_turned(arg(node, 0))),
        gated_products=sum(1 for node in calls if is_call(node, *ACTIVATIONS) and _is_gate(node)),
        routers=sum(1 for node in calls if is_call(node, aten.scatter.src) and _is_of_chosen(node)),
        scalings_by_one=sum(1 for node in calls if is_call(node, aten.mul.Tensor) and node.args[1:] == (1.0,)),
    )


def has_batch(node: fx.Node) -> bool:
    """Whether the value is a tensor with a first dimension of one and others behind it."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(value.shape[0], int) and value.shape[0] == 1
    )


def is_derivation(node: fx.Node) -> bool:
    """Whether the node is a constant's sum or product with a vector of parameters, or another dtype of one.

    What a norm does with its weight is part of the norm.
    """
    last = node
    while (user := only_user(last)) is not None and is_call(user, aten.add.Tensor, aten._to_copy.default):
        last = user
    if last is not node or only_user(node) is not None:
        product = only_user(last)
        if any(factor is last and _is_scaled(other) for factor, other in factors(product)):
            return False
    if not is_call(node, aten.add.Tensor, aten.mul.Tensor, aten._to_copy.default):
        return False
    parameter = arg(node, 0)
    constants = all(isinstance(other, int | float) for other in node.args[1:])
    is_vector = is_parameter(parameter) and parameter.meta["val"].dim() <= 1
    return constants and is_vector and not set(node.kwargs) - {"dtype"}


def _is_linear(node: fx.Node) -> bool:
    if not is_call(node, *_LINEARS):
        return False
    matrix = arg(node, -1)
    return is_call(matrix, aten.t.default) and is_parameter(arg(matrix, 0))


def _is_layer_norm(node: fx.Node) -> bool:
    return is_call(node, aten.native_layer_norm.default) and arg(node, 0).meta["val"].dim() == 2


def _of_tokens(rsqrt: fx.Node) -> bool:
    return rsqrt.meta["val"].dim() == 2


def _normed(rsqrt: fx.Node) -> Any:
    """What a norm is of: the value that is scaled by the root."""
    for user in rsqrt.users:
        for factor, root in factors(user):
            if root is rsqrt:
                return through_cast(factor)
    return None


def _is_norm(value: Any) -> bool:
    """Whether a value is a norm times its weight."""
    return any(_is_scaled(factor) for factor, _ in factors(through_cast(value)))


def _is_scaled(value: Any) -> bool:
    """Whether a value is another times the root in a norm."""
    return any(is_call(root, aten.rsqrt.default) for _, root in factors(through_cast(value)))


def _is_sum(value: Any) -> bool:
    return is_call(value, aten.add.Tensor) and all(
        isinstance(addend, fx.Node) and addend.meta["val"].shape == value.meta["val"].shape for addend in value.args
    )


def _is_gate(activation: fx.Node) -> bool:
    product = only_user(activation) if activation.meta["val"].dim() == 2 else None
    return product is not None and any(
        found is activation and other is not activation for found, other in factors(product)
    )


def _is_of_chosen(scatter: fx.Node) -> bool:
    """Whether it puts weights where a choice of the largest says."""
    index = arg(scatter, 2)
    return is_call(index, operator.getitem) and is_call(arg(index, 0), aten.topk.default)


def _is_turned(query: Any) -> bool:
    """Whether a query is made with cosines, without a linear in between."""
    pending, seen = [query], set()
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if is_call(node, aten.cos.default):
            return True
        if is_call(node, *_TURNING, *_VIEWS, aten.select.int, aten.cos.default):
            pending += node.all_input_nodes
    return False
