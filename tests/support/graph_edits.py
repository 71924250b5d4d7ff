"""Ways to break a graph after a pass: each takes the graph and edits it in place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import compiled_engine.passes.registry  # noqa: F401 - defines the ops
from compiled_engine.passes.framework.graph_inputs import is_parameter
from compiled_engine.passes.rope import rope_kv_write

aten = torch.ops.aten
ours = torch.ops.compiled_engine
NORM, SUM_NORM = ours.rms_norm.default, ours.residual_rms_norm.default
ANGLES, ROPE, ATTENTION = ours.rope_angles.default, ours.rope_kv_write.default, ours.attention.default
ROPE_ATTEND = ours.rope_attend.default
CONVOLUTION = ours.conv_state.default
LAYER_NORM = ours.layer_norm.default
SILU_MUL, LINEAR, EXPERTS = ours.silu_mul.default, ours.small_batch_linear.default, ours.experts.default
GATED = ours.gated_linear.default

Edit = Callable[[fx.Graph], None]


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


def set_argument(target: Any, name: str, change: Callable[[Any], Any]) -> Edit:
    """Change an argument, by its name in the op's schema, of the first call where it is given."""
    index = _place(target, name)

    def edit(graph: fx.Graph) -> None:
        node = next(node for node in calls(graph, target) if node.args[index] is not None)
        node.update_arg(index, change(node.args[index]))

    return edit


def swap_arguments(target: Any, one: str, other: str) -> Edit:
    i, j = _place(target, one), _place(target, other)

    def edit(graph: fx.Graph) -> None:
        node = calls(graph, target)[0]
        first, second = node.args[i], node.args[j]
        node.update_arg(i, second)
        node.update_arg(j, first)

    return edit


def copy_argument(target: Any, source: str, to: str) -> Edit:
    """Copy an argument over another one in the first call where that is given."""
    i, j = _place(target, source), _place(target, to)

    def edit(graph: fx.Graph) -> None:
        node = next(node for node in calls(graph, target) if node.args[j] is not None)
        node.update_arg(j, node.args[i])

    return edit


def take_from_next(target: Any, name: str) -> Edit:
    """Give the first call an argument of the next call whose argument there is another node of the same shape."""
    index = _place(target, name)

    def edit(graph: fx.Graph) -> None:
        node, *others = [node for node in calls(graph, target) if node.args[index] is not None]
        mine: Any = node.args[index]
        theirs = (other.args[index] for other in others)
        node.update_arg(
            index, next(n for n in theirs if n is not mine and n.meta["val"].shape == mine.meta["val"].shape)
        )

    return edit


def _place(target: Any, name: str) -> int:
    """Return an argument's position in calls of an op."""
    return [argument.name for argument in target._schema.arguments].index(name)


def swap_results(target: Any, num_results: int = 2) -> Edit:
    """Reverse the results of the first call with num_results results: readers of result i read the last but i."""

    def edit(graph: fx.Graph) -> None:
        found = (node for node in calls(graph, target) if len(node.meta["val"]) == num_results)
        for item in list(next(found).users):
            item.update_arg(1, num_results - 1 - item.args[1])  # type: ignore[operator]

    return edit


def reverse_packed(ending: str) -> Edit:
    """Reverse the members of a packed parameter."""

    def edit(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            source = node.meta["source"]
            if is_parameter(node) and source.members and source.name.endswith(ending):
                node.meta["source"] = replace(source, members=source.members[::-1])
                return
        raise AssertionError(f"no packed parameter ends in {ending}")

    return edit


def skip(target: Any, which: Callable[[fx.Node], bool] = lambda node: True) -> Edit:
    """Remove the first call for which `which` is true: its readers read its input."""

    def edit(graph: fx.Graph) -> None:
        node = next(node for node in calls(graph, target) if which(node))
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)

    return edit


def is_scaled(node: fx.Node) -> bool:
    return isinstance(node.args[1], float)


def widens(node: fx.Node) -> bool:
    return node.kwargs.get("dtype") == torch.float32 and node.args[0].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]


def drop_bias(graph: fx.Graph) -> None:
    node = calls(graph, aten.addmm.default)[0]
    node.target, node.args = aten.mm.default, node.args[1:]


def forget_residual(graph: fx.Graph) -> None:
    norm = calls(graph, SUM_NORM)[0]
    total = next(item for item in norm.users if item.args[1] == 1)
    total.replace_all_uses_with(norm.args[0])  # type: ignore[arg-type]


def other_experts(graph: fx.Graph) -> None:
    """Reverse the weights of each token's chosen experts, so that each gets another expert's weight."""
    node = calls(graph, EXPERTS)[0]
    with graph.inserting_before(node):
        node.update_arg(17, graph.call_function(aten.flip.default, (node.args[17], [1])))


def unscaled_q(graph: fx.Graph) -> None:
    node = calls(graph, ROPE)[0]
    node.update_arg(0, node.args[0].args[0])  # type: ignore[union-attr]


def slots_off_by_one(graph: fx.Graph) -> None:
    node = calls(graph, ROPE)[0]
    with graph.inserting_before(node):
        node.update_arg(4, graph.call_function(aten.add.Tensor, (node.args[4], 1)))


def unrotated_k(graph: fx.Graph) -> None:
    """Rotate k back before the op, so that the op writes it unrotated."""
    node = calls(graph, ROPE)[0]
    k, cos, sin = (node.args[_place(ROPE, name)] for name in ("k_TKd", "cos_T1d", "sin_T1d"))
    with graph.inserting_before(node):
        back = graph.call_function(aten.neg.default, (sin,))
        both = graph.call_function(rope_kv_write.reference, (k, k, None, None, 0.0, cos, back))
        node.update_arg(1, graph.call_function(operator.getitem, (both, 1)))


def swap_halves(graph: fx.Graph) -> None:
    node = calls(graph, SILU_MUL)[0]
    with graph.inserting_before(node):
        gate_up: Any = node.args[0]
        halves = graph.call_function(torch.chunk, (gate_up, 2, -1))
        gate, up = (graph.call_function(operator.getitem, (halves, i)) for i in range(2))
        node.update_arg(0, graph.call_function(torch.cat, ([up, gate], -1)))


def no_silu(graph: fx.Graph) -> None:
    node = calls(graph, SILU_MUL)[0]
    with graph.inserting_before(node):
        halves = graph.call_function(torch.chunk, (node.args[0], 2, -1))
        gate, up = (graph.call_function(operator.getitem, (halves, i)) for i in range(2))
    node.target, node.args = aten.mul.Tensor, (gate, up)


def drop_attention(graph: fx.Graph) -> None:
    graph.erase_node(calls(graph, ATTENTION)[0])


def write_twice(graph: fx.Graph) -> None:
    node = calls(graph, ROPE)[0]
    with graph.inserting_after(node):
        graph.call_function(ROPE, node.args)
