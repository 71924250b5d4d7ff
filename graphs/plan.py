"""The plan of a compiled forward: which pieces and ops run in which order on which values. Plain JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from compiled_engine.graphs.split import Step, piece_key
from compiled_engine.parameter_layout import PackedParameter, ParameterLayout
from compiled_engine.passes.graph_inputs import Source, source_of
from compiled_engine.passes.matching import arg


@dataclass(frozen=True)
class PlannedStep:
    """A call of `piece` (a piece key) or of splitting op `op`.

    Arguments are {"value": index} or {"constant": c}; results are the indices of the values it defines.
    """

    piece: str | None
    op: str | None
    arguments: tuple[dict[str, Any], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Value i is input i for the first len(inputs) values; steps define the others."""

    inputs: tuple[Source, ...]
    steps: tuple[PlannedStep, ...]
    outputs: tuple[int, ...]

    def layout(self) -> ParameterLayout:
        """The packed parameters that the pieces take."""
        return ParameterLayout(tuple(PackedParameter(s.name, s.members) for s in self.inputs if s.members))

    def piece_keys(self) -> tuple[str, ...]:
        """The unique pieces, in order of first use."""
        return tuple(dict.fromkeys(step.piece for step in self.steps if step.piece))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        inputs = tuple(Source(**item | {"members": tuple(item["members"])}) for item in data["inputs"])
        steps = tuple(
            PlannedStep(s["piece"], s["op"], tuple(s["arguments"]), tuple(s["results"])) for s in data["steps"]
        )
        return Plan(inputs, steps, tuple(data["outputs"]))


def make_plan(graph: fx.Graph, steps: list[Step]) -> tuple[Plan, dict[str, Step]]:
    """The plan of a split graph, and for each unique piece key the first step that has it."""
    index: dict[fx.Node, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        index[node] = len(index)
    inputs = tuple(source_of(node) for node in index)
    unique: dict[str, Step] = {}
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
            key = piece_key(step.piece)
            unique.setdefault(key, step)
        planned.append(PlannedStep(key, step.op, arguments, tuple(index[node] for node in step.outputs)))
    outputs = arg(graph.output_node(), 0)
    return Plan(inputs, tuple(planned), tuple(index[node] for node in outputs)), unique
