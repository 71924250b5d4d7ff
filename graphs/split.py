"""Split a whole model's graph at its splitting ops into pieces.

Pieces take their inputs in order of first use, and what differs between layers is an input, so the layers of a
model give structurally equal pieces, which compile once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_engine.graphs.splitting_ops import SPLITTING_OPS


@dataclass(frozen=True)
class Step:
    """One step of the stitched forward: a piece, or a splitting op called by `op` name.

    `inputs` are nodes of the whole graph, or constants for an op; `outputs` are the nodes it defines.
    """

    piece: fx.GraphModule | None
    op: str | None
    inputs: tuple[Any, ...]
    outputs: tuple[fx.Node, ...]


class SplitError(RuntimeError):
    """The graph cannot be split safely."""


def split(graph: fx.Graph) -> list[Step]:
    """Steps in execution order. Raises SplitError on a mutating op that is not a splitting op."""
    steps: list[Step] = []
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        name = _op_name(node)
        if name in SPLITTING_OPS:
            if pending:
                steps.append(_piece(pending))
                pending = []
            if node.kwargs:
                raise SplitError(f"splitting op {name} is called with keywords: {dict(node.kwargs)}")
            steps.append(Step(None, name, tuple(node.args), (node,) if node.users else ()))
        elif _mutates(node):
            raise SplitError(f"op {name} mutates an input, and is not one of the splitting ops {list(SPLITTING_OPS)}")
        else:
            pending.append(node)
    return [*steps, _piece(pending)] if pending else steps


def _op_name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _piece(nodes: list[fx.Node]) -> Step:
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
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
        copies[node].meta = _value_meta(node)
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph.output(tuple(copies[node] for node in outputs))
    return Step(fx.GraphModule({}, graph), None, tuple(inputs), outputs)


def _value_meta(node: fx.Node) -> dict[str, Any]:
    value = node.meta["val"]
    return {"val": value, "example_value": value}
