"""Replaces each linear by a kernel for small batches, which reads the weight at memory bandwidth.

The kernel also computes the norm before the linear, and silu * up or the residual add after it. A norm before experts
and a residual add after them become part of the experts' op in the same way.

Why: with few tokens, a linear takes as long as reading its weight. Without the pass, most of a decode step is overhead
of general matrix products and of the launches around them. The pass runs late, since it absorbs the ops of
residual_rms_norm and silu_mul.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, change, emit, emit_named, is_call, named, only_user
from compiled_engine.passes.linear.linears import Linear, linear_of, multiplied_values, why_no_linear
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, small_batch_linear


@dataclass(frozen=True)
class _Fused:
    """A linear with the ops that are fused with it. Together they compute the value of `result` from `x`."""

    linear: Linear
    result: fx.Node
    x: fx.Node
    norm_weight: fx.Node | None = None
    eps: float = 0.0
    norm_offset: float = 0.0
    norm_wide: bool = False
    residual: fx.Node | None = None
    silu_mul: bool = False
    activation: str = "silu"


class SmallBatchLinear(GraphPass):
    name = "small_batch_linear"
    kernel_token_counts = TOKEN_BUCKETS

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return None if compile_range.small else f"{compile_range.name} tokens is not a small-batch range"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that are multiplied by a weight matrix.

        merge_linears leaves one linear, and so one match, per value.
        """
        return len(multiplied_values(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        linears: dict[fx.Node, _Fused] = {}
        near_misses: list[str] = []
        for node in graph.nodes:
            linear = linear_of(node)
            if linear is not None and linear.is_known:
                linears[node] = _Fused(linear, node, linear.x)
            elif linear is not None:
                near_misses.append(f"{node.name}: its weight is stored as {linear.format}")
            elif (reason := why_no_linear(node)) is not None:
                near_misses.append(f"{node.name}: {reason}")
        known = set(graph.nodes)
        _take_in_silu_mul(linears)
        new = _take_in_norms(graph, linears)
        for fused in linears.values():
            new[fused.result] = _rewrite(graph, fused, new)
        replacements = tuple(Replacement(before.name, after) for before, after in new.items() if before in known)
        graph.eliminate_dead_code()
        return PassResult(len(linears), tuple(near_misses), replacements)


def _take_in_silu_mul(linears: dict[fx.Node, _Fused]) -> None:
    for node, fused in linears.items():
        user = only_user(node)
        if user is not None and is_call(user, torch.ops.compiled_engine.silu_mul.default):
            linears[node] = replace(fused, result=user, silu_mul=True, activation=named(user)["activation"])


def _take_in_norms(graph: fx.Graph, linears: dict[fx.Node, _Fused]) -> dict[fx.Node, fx.Node]:
    """Fuse each norm that only linears read into these linears, by changing their entries in `linears`.

    If the norm's input is a residual sum, the addition is fused into the linear that computes the addend; if no linear
    computes it, the addition becomes an op of its own. A sum whose addend is normed is left unchanged. The experts op
    counts as a linear; if it changes, a new node replaces its node. Returns: replaced value -> the node that now
    computes it.
    """
    changed_experts: dict[fx.Node, fx.Node] = {}  # -> the value that each now computes
    for norm in graph.find_nodes(op="call_function", target=torch.ops.compiled_engine.rms_norm.default):
        if all(_takes(linears, user, norm) for user in norm.users):
            for user in list(norm.users):
                _take_in_norm(linears, changed_experts, user, named(norm))
    new = {}
    for norm in graph.find_nodes(op="call_function", target=torch.ops.compiled_engine.residual_rms_norm.default):
        normed, total = _item(norm, 0), _item(norm, 1)
        if normed is None or not all(_takes(linears, user, normed) for user in normed.users):
            continue
        arguments = named(norm)
        x, residual = arguments["x_TD"], arguments["residual_TD"]
        if arguments["inner_weight_D"] is not None:  # the addend is a norm of the linear's result, so it cannot add it
            continue
        if total is None:
            with graph.inserting_after(norm):
                total = graph.call_function(operator.getitem, (norm, 1))
            total.meta["val"] = norm.meta["val"][1]
        for user in list(normed.users):
            _take_in_norm(linears, changed_experts, user, arguments | {"x_TD": total})
        before = linears.get(x)
        if before is not None and only_user(x) is norm:
            linears[x] = replace(before, result=total, residual=residual)
        elif _is_experts(x) and only_user(x) is norm:
            change(x, residual_TD=residual)
            changed_experts[x] = total
        else:
            with graph.inserting_before(norm):
                new[total] = emit(graph, aten.add.Tensor, residual, x)
            total.replace_all_uses_with(new[total])
    for node, result in changed_experts.items():
        with graph.inserting_before(node):
            new[result] = emit(graph, torch.ops.compiled_engine.experts.default, *node.args)
        for replaced in {node, result}:
            replaced.replace_all_uses_with(new[result])
        graph.erase_node(node)
    return new


def _takes(linears: dict[fx.Node, _Fused], user: fx.Node, value: fx.Node) -> bool:
    """Return whether `user` is a linear or the experts op, with `value` as its input."""
    return linears[user].x is value if user in linears else _is_experts(user) and user.args[0] is value


def _take_in_norm(
    linears: dict[fx.Node, _Fused], changed_experts: dict[fx.Node, fx.Node], user: fx.Node, norm: dict[str, Any]
) -> None:
    """Fuse a norm into `user`, a linear or the experts op, whose input is the norm's result.

    The entry of a linear in `linears` is changed; the node of an experts op is changed in place and added to
    `changed_experts`. norm: the arguments of the op that computes the norm.
    """
    x, weight = norm["x_TD"], norm["weight_D"]
    how = {"eps": norm["eps"], "norm_offset": norm["offset"], "norm_wide": norm["wide"]}
    if user in linears:
        linears[user] = replace(linears[user], x=x, norm_weight=weight, **how)
    else:
        change(user, x_TD=x, norm_weight_D=weight, **how)
        changed_experts.setdefault(user, user)


def _is_experts(node: object) -> bool:
    return is_call(node, torch.ops.compiled_engine.experts.default)


def _item(sequence: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in sequence.users if is_call(user, operator.getitem) and user.args[1] == index), None)


def _rewrite(graph: fx.Graph, fused: _Fused, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """Emit small_batch_linear, or the op for its weight format, in place of a linear and the ops fused with it.

    Returns the new node. new: replaced value -> the node that now computes it.
    """
    arguments = {
        "x_TK": new.get(fused.x, fused.x),
        "weight_NK": fused.linear.weight,
        "bias_N": fused.linear.bias,
        "norm_weight_K": fused.norm_weight,
        "eps": fused.eps,
        "residual_TM": None if fused.residual is None else new.get(fused.residual, fused.residual),
        "silu_mul": fused.silu_mul,
        "activation": fused.activation,
        "norm_offset": fused.norm_offset,
        "norm_wide": fused.norm_wide,
    }
    op = small_batch_linear
    if fused.linear.quantised is not None:
        op = quantised_linear
        arguments |= named(fused.linear.node) | {n: v for n, v in arguments.items() if n != "weight_NK"}
    with graph.inserting_before(fused.result):
        call = emit_named(graph, op, arguments)
    fused.result.replace_all_uses_with(call)
    return call
