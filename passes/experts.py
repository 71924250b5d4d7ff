"""A mixture of experts becomes one op, from the router's logits to the weighted sum of what the chosen experts make.

Why: the textbook lets every expert compute every token, since a graph's shapes may not depend on values. The op
computes and reads the chosen experts alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.experts_op import experts
from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import (
    arg,
    aten,
    emit,
    factors,
    is_call,
    only_user,
    rewrite_calls,
    through_cast,
    user_through_cast,
)
from compiled_engine.passes.structure import Structure


class Experts(GraphPass):
    name = "experts"
    kernel_token_counts = (1, 64, 1024)

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.routers

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.topk.default, _rewrite)


def _rewrite(graph: fx.Graph, topk: fx.Node) -> list[Replacement] | str | None:
    """topk: of a router's probabilities, or of anything else."""
    softmax = arg(topk, 0)
    if not is_call(softmax, aten._softmax.default):
        return None
    if len(topk.args) != 2 or topk.kwargs:
        return "the choice is not of the largest along the last dimension"
    if softmax.args[1] not in (-1, 1) or softmax.meta["val"].dim() != 2 or softmax.meta["val"].dtype != torch.float32:
        return "the probabilities are not of each row, in fp32"
    weights, chosen = (_item(topk, i) for i in range(2))
    scatter: Any = None if chosen is None else only_user(chosen)
    if weights is None or not is_call(scatter, aten.scatter.src):
        return "what is chosen is not scattered into a matrix of weights"
    zeros, dim, index, source = scatter.args
    source = through_cast(source)
    renormalise = source is not weights
    if renormalise and not _is_share(source, weights):
        return "the weights are neither the probabilities nor their shares of the sum"
    if not is_call(zeros, aten.zeros_like.default, aten.new_zeros.default) or dim not in (-1, 1) or index is not chosen:
        return "the weights are not scattered into zeros along the experts"
    found = _weighted_sum(scatter)
    if isinstance(found, str):
        return found
    total, x, gate_up, down = found
    logits = through_cast(softmax.args[0])
    if logits.meta["val"].dtype != x.meta["val"].dtype:
        return "the router's dtype is another than that of its input"
    with graph.inserting_before(total):
        how = topk.args[1], renormalise, "silu", 0.0, 0.0, False, None, 0.0, 0.0, False, None
        fused = emit(graph, experts, x, logits, gate_up, down, None, None, *how)
    total.replace_all_uses_with(fused)
    return [Replacement(total.name, fused)]


def _item(sequence: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in sequence.users if is_call(user, operator.getitem) and user.args[1] == index), None)


def _is_share(value: Any, weights: fx.Node) -> bool:
    """Whether it is weights / their sum in each row."""
    if not is_call(value, aten.div.Tensor) or value.args[0] is not weights:
        return False
    total = value.args[1]
    return is_call(total, aten.sum.dim_IntList) and total.args[0] is weights and total.args[1:] == ([-1], True)


def _weighted_sum(scatter: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | str:
    """(sum, x, gate_up, down) of the experts whose weights are scattered, or why they are not such."""
    transposed: Any = user_through_cast(scatter)
    column: Any = None if transposed is None else only_user(transposed)
    weighted: Any = None if column is None else only_user(column)
    total: Any = None if weighted is None else only_user(weighted)
    if not (is_call(transposed, aten.t.default) and is_call(column, aten.unsqueeze.default)):
        return "the weights are not made a column for each expert"
    if not (is_call(total, aten.sum.dim_IntList) and total.args[1:] == ([0],) and not total.kwargs):
        return "what is weighted is not summed over the experts"
    y: Any = next((y for y, weight in factors(weighted) if weight is column), None)
    if not is_call(y, aten.bmm.default) or not _is_transposed_parameter(y.args[1]):
        return "what is weighted is not a product with a parameter of each expert"
    hidden, down = y.args[0], y.args[1].args[0]
    activated: Any = next((a for a, _ in factors(hidden) if is_call(a, aten.silu.default)), None)
    if activated is None:
        return "what goes into the second product is not silu(gate) * up"
    gate: Any = activated.args[0]
    up: Any = next(other for one, other in factors(hidden) if one is activated)
    halves = [is_call(half, operator.getitem) and half.args[1] == i for i, half in enumerate((gate, up))]
    if not (all(halves) and gate.args[0] is up.args[0] and is_call(gate.args[0], aten.split.Tensor)):
        return "gate and up are not the two halves of one product"
    split: Any = gate.args[0]
    product: Any = split.args[0]
    if len(split.meta["val"]) != 2 or split.args[2:] not in ((-1,), (2,)):
        return "gate and up are not the two halves of one product"
    if not is_call(product, aten.bmm.default) or not _is_transposed_parameter(product.args[1]):
        return "gate and up are not a product with a parameter of each expert"
    x: Any = product.args[0]
    if not is_call(x, aten.expand.default) or x.args[0].meta["val"].dim() != 2:
        return "the experts do not all get the same tokens"
    return total, x.args[0], product.args[1].args[0], down


def _is_transposed_parameter(node: Any) -> bool:
    """Of [E, N, K] parameters [E, K, N]."""
    transposed = is_call(node, aten.transpose.int) and node.args[1:] in ((1, 2), (2, 1))
    permuted = is_call(node, aten.permute.default) and list(node.args[1]) == [0, 2, 1]
    return (transposed or permuted) and is_parameter(node.args[0])
