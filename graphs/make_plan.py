"""From a split graph to its plan and its unique pieces."""

from __future__ import annotations

from torch import fx

from compiled_engine.graphs.piece import piece_key, piece_to_json
from compiled_engine.graphs.plan import Plan, PlannedStep
from compiled_engine.graphs.split import Step
from compiled_engine.passes.graph_inputs import source_of
from compiled_engine.passes.matching import arg


def make_plan(graph: fx.Graph, steps: list[Step]) -> tuple[Plan, dict[str, str]]:
    """The plan of a split graph, and each unique piece's JSON by its key."""
    index: dict[fx.Node, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        index[node] = len(index)
    inputs = tuple(source_of(node) for node in index)
    unique: dict[str, str] = {}
    planned = []
    for step in steps:
        arguments = tuple(
            {"value": index[argument]} if isinstance(argument, fx.Node) else {"constant": argument}
            for argument in step.inputs
        )
        for node in step.outputs:
            index[node] = len(index)
        key = None
        if step.piece is not None:
            text = piece_to_json(step.piece)
            key = piece_key(text)
            unique[key] = text
        planned.append(PlannedStep(key, step.op, arguments, tuple(index[node] for node in step.outputs)))
    outputs = arg(graph.output_node(), 0)
    return Plan(inputs, tuple(planned), tuple(index[node] for node in outputs)), unique
