"""A mixture of experts becomes one op, from the router's logits to the weighted sum of what the chosen experts make.

Why: the textbook lets every expert compute every token, since a graph's shapes may not depend on values. The op
computes and reads the chosen experts alone.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from compiled_engine.passes.experts_gate import Gate
from compiled_engine.passes.experts_gate_match import match_gate
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


class _Routing(NamedTuple):
    """Logits of the router, experts of a token, whether their weights add up to 1, and the matrix of all weights."""

    logits: fx.Node
    top_k: int
    renormalise: bool
    scatter: fx.Node


class _Product(NamedTuple):
    """x @ weight^T + bias for each expert; `transposed`: the parameter is the transpose of the weight."""

    x: fx.Node
    parameter: fx.Node
    transposed: bool
    bias: fx.Node | None


def _rewrite(graph: fx.Graph, topk: fx.Node) -> list[Replacement] | str | None:
    """topk: of a router's logits or probabilities, or of anything else."""
    routing = _routing(topk)
    if not isinstance(routing, _Routing):
        return routing
    found = _weighted_sum(routing.scatter)
    if isinstance(found, str):
        return found
    total, x, gate_up, gate, down = found
    if routing.logits.meta["val"].dtype != x.meta["val"].dtype:
        return "the router's dtype is another than that of its input"
    with graph.inserting_before(total):
        weights = [
            emit(graph, aten.transpose.int, product.parameter, 1, 2) if product.transposed else product.parameter
            for product in (gate_up, down)
        ]
        operands = x, routing.logits, *weights, gate_up.bias, down.bias
        how = routing.top_k, routing.renormalise, gate.activation, gate.alpha, gate.limit, gate.interleaved
        fused = emit(graph, experts, *operands, *how, None, 0.0, 0.0, False, None)
    total.replace_all_uses_with(fused)
    return [Replacement(total.name, fused)]


def _routing(topk: fx.Node) -> _Routing | str | None:
    """Softmax of the logits and then the choice, or the choice and then softmax of what is chosen."""
    weights, chosen = (_item(topk, i) for i in range(2))
    softmax: Any = arg(topk, 0)
    behind: Any = None if weights is None else user_through_cast(weights)
    first = is_call(softmax, aten._softmax.default)
    if not first:
        softmax, weights = behind, behind
    if not is_call(softmax, aten._softmax.default):
        return None
    if len(topk.args) != 2 or topk.kwargs:
        return "the choice is not of the largest along the last dimension"
    if softmax.args[1] not in (-1, 1) or softmax.meta["val"].dim() != 2:
        return "the probabilities are not of each row"
    if first and softmax.meta["val"].dtype != torch.float32:
        return "the probabilities are not in fp32"
    scatter: Any = None if chosen is None else only_user(chosen)
    if weights is None or not is_call(scatter, aten.scatter.src):
        return "what is chosen is not scattered into a matrix of weights"
    zeros, dim, index, source = scatter.args
    source = through_cast(source)
    shares = source is not weights
    if shares and not (first and _is_share(source, weights)):
        return "the weights are neither the probabilities nor their shares of the sum"
    if not is_call(zeros, aten.zeros_like.default, aten.new_zeros.default) or dim not in (-1, 1) or index is not chosen:
        return "the weights are not scattered into zeros along the experts"
    logits = through_cast(arg(softmax if first else topk, 0))
    return _Routing(logits, arg(topk, 1), shares or not first, scatter)


def _item(sequence: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in sequence.users if is_call(user, operator.getitem) and user.args[1] == index), None)


def _is_share(value: Any, weights: fx.Node) -> bool:
    """Whether it is weights / their sum in each row."""
    if not is_call(value, aten.div.Tensor) or value.args[0] is not weights:
        return False
    total = value.args[1]
    return is_call(total, aten.sum.dim_IntList) and total.args[0] is weights and total.args[1:] == ([-1], True)


def _weighted_sum(scatter: fx.Node) -> tuple[fx.Node, fx.Node, _Product, Gate, _Product] | str:
    """(sum, x, first product, gate, second product) of the experts whose weights are scattered, or why they are not
    such."""
    transposed: Any = user_through_cast(scatter)
    column: Any = None if transposed is None else only_user(transposed)
    weighted: Any = None if column is None else only_user(column)
    total: Any = None if weighted is None else only_user(weighted)
    if not (is_call(transposed, aten.t.default) and is_call(column, aten.unsqueeze.default)):
        return "the weights are not made a column for each expert"
    if not (is_call(total, aten.sum.dim_IntList) and total.args[1:] == ([0],) and not total.kwargs):
        return "what is weighted is not summed over the experts"
    down = next((_product(y) for y, weight in factors(weighted) if weight is column), None)
    if down is None:
        return "what is weighted is not a product with a parameter of each expert"
    found = match_gate(down.x)
    if isinstance(found, str):
        return found
    gated, gate = found
    gate_up = _product(gated)
    if gate_up is None:
        return "gate and up are not a product with a parameter of each expert"
    if not is_call(gate_up.x, aten.expand.default) or arg(gate_up.x, 0).meta["val"].dim() != 2:
        return "the experts do not all get the same tokens"
    return total, arg(gate_up.x, 0), gate_up, gate, down


def _product(value: Any) -> _Product | None:
    """A batched product with a parameter [E, K, N], or the transpose of one, and a bias [E, N] where there is one."""
    bias = None
    if is_call(value, aten.add.Tensor) and len(value.args) == 2 and not value.kwargs:
        for product, row in (value.args, value.args[::-1]):
            if is_call(row, aten.unsqueeze.default) and row.args[1] == 1 and is_parameter(row.args[0]):
                value, bias = product, row.args[0]
                break
    if not is_call(value, aten.bmm.default):
        return None
    x, matrix = value.args
    if is_parameter(matrix):
        return _Product(x, matrix, True, bias)
    transposed = is_call(matrix, aten.transpose.int) and matrix.args[1:] in ((1, 2), (2, 1))
    permuted = is_call(matrix, aten.permute.default) and list(matrix.args[1]) == [0, 2, 1]
    if (transposed or permuted) and is_parameter(matrix.args[0]):
        return _Product(x, matrix.args[0], False, bias)
    return None
