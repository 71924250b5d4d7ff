"""Splits a model's graph at its splitting ops into pieces, and plans the calls of pieces and splitting ops.

A piece takes its inputs in order of first use, and everything that differs between layers is an input. Equal layers
therefore give equal pieces, which are compiled only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from compiled_engine.attention.inputs import FORWARD_ARGUMENTS
from compiled_engine.graphs.compiler.piece import piece_key, piece_to_json
from compiled_engine.graphs.compiler.plan import Carried, Plan, PlannedStep
from compiled_engine.passes.framework.graph_inputs import source_of
from compiled_engine.passes.framework.matching import arg
from compiled_engine.passes.registry import splitting_ops


@dataclass(frozen=True)
class Step:
    """A call of a piece, a subgraph that is compiled by itself, or of a splitting op; `piece` or `op` is None."""

    piece: fx.GraphModule | None
    op: str | None
    inputs: tuple[Any, ...]  # nodes of the whole graph; for an op also constants
    outputs: tuple[fx.Node, ...]  # nodes that the call defines


class SplitError(RuntimeError):
    """Raised for a graph that cannot be split safely."""


def split(graph: fx.Graph) -> list[Step]:
    """Return the calls of pieces and splitting ops that a graph consists of, in execution order.

    Raises SplitError for a splitting op with keyword arguments, and for any other op that mutates its inputs.
    """
    steps: list[Step] = []
    pending: list[fx.Node] = []
    known = splitting_ops()
    sizes: dict[sympy.Expr, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt):
            sizes[node.meta["val"].node.expr] = node
        if node.op in ("placeholder", "output"):
            continue
        name = _op_name(node)
        if name in known:
            if pending:
                steps.append(_piece(pending, sizes))
                pending = []
            if node.kwargs:
                raise SplitError(f"splitting op {name} is called with keywords: {dict(node.kwargs)}")
            steps.append(Step(None, name, tuple(node.args), (node,) if node.users else ()))
        elif _mutates(node):
            raise SplitError(f"op {name} mutates an input, and is not one of the splitting ops {list(known)}")
        else:
            pending.append(node)
    return [*steps, _piece(pending, sizes)] if pending else steps


def make_plan(
    graph: fx.Graph, steps: list[Step], arguments: Sequence[str] = FORWARD_ARGUMENTS
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of a graph, and the JSON of each unique piece by its key.

    steps: the result of `split`. arguments: names of the callable's arguments, see Signature. In the plan they are
    followed by the names of the inputs that passes have added to the graph.
    """
    index: dict[fx.Node, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        index[node] = len(index)
    inputs = tuple(source_of(node) for node in index)
    unique: dict[str, str] = {}
    planned = []
    for step in steps:
        taken = tuple(
            {"value": index[value]} if isinstance(value, fx.Node) else {"constant": value} for value in step.inputs
        )
        for node in step.outputs:
            index[node] = len(index)
        key = None
        if step.piece is not None:
            text = piece_to_json(step.piece)
            key = piece_key(text)
            unique[key] = text
        planned.append(PlannedStep(key, step.op, taken, tuple(index[node] for node in step.outputs)))
    outputs = tuple(index[node] for node in arg(graph.output_node(), 0))
    given = (source.name.partition(".")[0] for source in inputs if source.kind == "argument")
    carried = _carried(steps, index, set(outputs))
    return Plan(tuple(dict.fromkeys((*arguments, *given))), inputs, tuple(planned), outputs, carried), unique


def _carried(steps: list[Step], index: dict[fx.Node, int], outputs: set[int]) -> tuple[Carried, ...]:
    """Return the values with a row per token that are defined before an attention op and read after it.

    index: node -> index of its value in the plan. outputs: indices of the graph's outputs.
    """
    known = splitting_ops()
    attentions = [number for number, step in enumerate(steps) if step.op is not None and known[step.op].attends]
    last_use = {node: number for number, step in enumerate(steps) for node in step.inputs if isinstance(node, fx.Node)}
    carried = []
    for number, step in enumerate(steps):
        for node in step.outputs:
            last = len(steps) if index[node] in outputs else last_use.get(node, number)
            value = node.meta["val"]
            if any(number < attention < last for attention in attentions) and _has_rows(value):
                dtype = str(value.dtype).removeprefix("torch.")
                carried.append(Carried(index[node], dtype, tuple(value.shape[1:])))
    return tuple(carried)


def _has_rows(value: Any) -> bool:
    """Return whether a value is a tensor whose first size is symbolic, and no other: it has a row per token."""
    depends = [isinstance(size, torch.SymInt) for size in value.shape] if isinstance(value, torch.Tensor) else []
    return depends[:1] == [True] and not any(depends[1:])


def _op_name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _piece(nodes: list[fx.Node], sizes: Mapping[sympy.Expr, fx.Node]) -> Step:
    """Return the call of a piece that consists of these nodes. sizes: the graph's inputs that are sizes, by symbol.

    If the shapes of the piece's inputs have 4 * n but not n, the size n becomes an input too, since Inductor does not
    compute n from 4 * n.
    """
    inside = set(nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in inside and argument not in copies:
                copies[argument] = graph.placeholder(f"input_{len(inputs)}")
                copies[argument].meta = _value_meta(argument)
                inputs.append(argument)
    for symbol in _hidden_symbols(inputs):
        if (size := sizes.get(symbol)) is not None:
            copies[size] = graph.placeholder(f"input_{len(inputs)}")
            copies[size].meta = _value_meta(size)
            inputs.append(size)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
        copies[node].meta = _value_meta(node)
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph.output(tuple(copies[node] for node in outputs))
    return Step(fx.GraphModule({}, graph), None, tuple(inputs), outputs)


def _hidden_symbols(inputs: Sequence[fx.Node]) -> list[sympy.Symbol]:
    """Return the symbols, such as n, that the inputs' shapes have only in expressions such as 4 * n, never alone."""
    values = [node.meta["val"] for node in inputs]
    found = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    expressions = [size.node.expr for size in found if isinstance(size, torch.SymInt)]
    symbols = dict.fromkeys(symbol for each in expressions for symbol in sorted(each.free_symbols, key=str))
    return [symbol for symbol in symbols if symbol not in expressions]


def _value_meta(node: fx.Node) -> dict[str, Any]:
    value = node.meta["val"]
    return {"val": value, "example_value": value}
