"""Replaces a mixture of experts by one op, from the router's logits to the weighted sum of the chosen experts' outputs.

If the routing is not one that the op implements, the op starts after it, from the chosen experts and their weights.

Why: textbook code computes every token with every expert, since shapes in a graph cannot depend on values. The op reads
and computes only the chosen experts.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from compiled_engine.passes.experts.experts_gate import Gate, match_gate
from compiled_engine.passes.experts.experts_op import experts
from compiled_engine.passes.experts.experts_tiles import TOKEN_COUNTS
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import (
    arg,
    aten,
    emit,
    emit_named,
    factors,
    is_call,
    named,
    only_user,
    rewrite_calls,
    through_cast,
    user_through_cast,
)
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.passes.linear.linears import ExpertsLinear, experts_linear_of


class Experts(GraphPass):
    name = "experts"
    kernel_token_counts = TOKEN_COUNTS

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of routers: scatters of weights whose index is the result of a top-k."""
        scatters = graph.find_nodes(op="call_function", target=aten.scatter.src)
        indices = [arg(scatter, 2) for scatter in scatters]
        return sum(1 for i in indices if is_call(i, operator.getitem) and is_call(arg(i, 0), aten.topk.default))

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.scatter.src, _rewrite)


class _Routing(NamedTuple):
    """The routing, which chooses each token's experts: by the op or, with `chosen`, by other nodes before the op."""

    logits: fx.Node  # of the router; with `chosen`, the weights of the chosen experts
    top_k: int
    renormalise: bool  # the chosen experts' weights add up to 1
    chosen: fx.Node | None = None  # the chosen experts, if the op does not implement the routing


def _rewrite(graph: fx.Graph, scatter: fx.Node) -> list[Replacement] | str | None:
    """Replace the experts around `scatter` by one call of the op.

    The scatter must write the weights of the chosen experts into a matrix of zeros with a column for each expert.
    Returns the replacement, the reason if the experts do not match, or None for any other scatter.
    """
    zeros, dim, chosen, weights = scatter.args
    is_matrix = scatter.meta["val"].dim() == 2 and dim in (-1, 1)
    if not is_matrix or not is_call(zeros, aten.zeros_like.default, aten.new_zeros.default):
        return None
    found = _weighted_sum(scatter)
    if isinstance(found, str):
        return found
    total, x, gate_up, gate, down = found
    routing = _known_routing(through_cast(weights), chosen)
    if routing is None or routing.logits.meta["val"].dtype != x.meta["val"].dtype:
        routing = _Routing(arg(scatter, 3), arg(scatter, 2).meta["val"].shape[1], False, arg(scatter, 2))
    with graph.inserting_before(total):
        matrices = [
            emit(graph, aten.transpose.int, product.weight, 1, 2) if product.transposed else product.weight
            for product in (gate_up, down)
        ]
        arguments = {
            **{"x_TD": x, "logits_TE": routing.logits, "gate_up_END": matrices[0], "down_EDI": matrices[1]},
            **{"gate_up_bias_EN": gate_up.bias, "down_bias_ED": down.bias},
            **{"top_k": routing.top_k, "renormalise": routing.renormalise, "chosen_TX": routing.chosen},
            **{"activation": gate.activation, "alpha": gate.alpha, "limit": gate.limit},
            "interleaved": gate.interleaved,
            **_codes_of(gate_up.weight, "gate_up_END", "gate_up"),
            **_codes_of(down.weight, "down_EDI", "down"),
        }
        fused = emit_named(graph, experts, arguments)
    total.replace_all_uses_with(fused)
    return [Replacement(total.name, fused)]


def _codes_of(weight: fx.Node, codes: str, prefix: str) -> dict[str, Any]:
    """Return the op's arguments for a quantised weight; {} for any other weight.

    codes: name of the argument for the codes. prefix: begins the names of the arguments for scales, zero points, scales
    of rows and scheme.
    """
    if not is_call(weight, experts_weight):
        return {}
    found = named(weight)
    names = "scales_ERC", "zeros_ERC", "row_scales_ER1", "scheme"
    beside = {f"{prefix}_{name}": found[name] for name in names}
    return {codes: found["codes_ENK"], **beside}


def _known_routing(weights: Any, chosen: Any) -> _Routing | None:
    """Return the routing that computes the chosen experts and their weights, or None if the op does not implement it.

    The op implements softmax followed by top-k, and top-k followed by softmax over the chosen logits.
    """
    topk: Any = arg(chosen, 0) if is_call(chosen, operator.getitem) and chosen.args[1] == 1 else None
    if not is_call(topk, aten.topk.default) or len(topk.args) != 2 or topk.kwargs or only_user(chosen) is None:
        return None
    values = next((user for user in topk.users if is_call(user, operator.getitem) and user.args[1] == 0), None)
    if is_call(weights, aten._softmax.default):
        of_chosen = through_cast(arg(weights, 0)) is values and _is_of_rows(weights)
        return _Routing(through_cast(arg(topk, 0)), arg(topk, 1), True) if of_chosen else None
    softmax = arg(topk, 0)
    if not is_call(softmax, aten._softmax.default) or not _is_of_rows(softmax):
        return None
    shares = _is_share(weights, values)
    if softmax.meta["val"].dtype != torch.float32 or not (shares or weights is values):
        return None
    return _Routing(through_cast(arg(softmax, 0)), arg(topk, 1), shares)


def _is_of_rows(softmax: fx.Node) -> bool:
    return softmax.args[1] in (-1, 1) and softmax.meta["val"].dim() == 2


def _is_share(value: Any, weights: fx.Node | None) -> bool:
    """Return whether the value is `weights`, each row divided by its sum."""
    if not is_call(value, aten.div.Tensor) or value.args[0] is not weights:
        return False
    total = value.args[1]
    return is_call(total, aten.sum.dim_IntList) and total.args[0] is weights and total.args[1:] == ([-1], True)


def _weighted_sum(scatter: fx.Node) -> tuple[fx.Node, fx.Node, ExpertsLinear, Gate, ExpertsLinear] | str:
    """Find the sum of all experts' outputs that takes its weights from `scatter`, and what the sum is computed from.

    Returns (sum, x, linear of gate and up, gate, second linear), or why the experts do not match.
    """
    transposed: Any = user_through_cast(scatter)
    column: Any = None if transposed is None else only_user(transposed)
    weighted: Any = None if column is None else only_user(column)
    total: Any = None if weighted is None else only_user(weighted)
    if not (is_call(transposed, aten.t.default) and is_call(column, aten.unsqueeze.default)):
        return "the weights are not made a column for each expert"
    if not (is_call(total, aten.sum.dim_IntList) and total.args[1:] == ([0],) and not total.kwargs):
        return "what is weighted is not summed over the experts"
    down = next((experts_linear_of(y) for y, weight in factors(weighted) if weight is column), None)
    if down is None:
        return "what is weighted is not a product with a parameter of each expert"
    found = match_gate(down.x)
    if isinstance(found, str):
        return found
    gated, gate = found
    gate_up = experts_linear_of(gated)
    if gate_up is None:
        return "gate and up are not a product with a parameter of each expert"
    if not is_call(gate_up.x, aten.expand.default) or arg(gate_up.x, 0).meta["val"].dim() != 2:
        return "the experts do not all get the same tokens"
    return total, arg(gate_up.x, 0), gate_up, gate, down
