"""Plan: the calls of pieces and splitting ops that a compiled callable makes, in order, with the values that they read.

A plan is stored as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.parameter import Parameter

Input = Source | Parameter


@dataclass(frozen=True)
class PlannedStep:
    """A call in a plan: of a piece, which is a compiled subgraph, or of a splitting op, such as attention."""

    piece: str | None  # key of the piece, or None
    op: str | None  # name of the splitting op, or None
    arguments: tuple[dict[str, Any], ...]  # {"value": index} or {"constant": c} each
    results: tuple[int, ...]  # indices of the values that the call defines

    def renumbered(self, new: Mapping[int, int]) -> PlannedStep:
        """Return a copy with other indices for the values that the call reads and defines. new: old -> new index."""
        arguments = tuple({"value": new[a["value"]]} if "value" in a else a for a in self.arguments)
        return replace(self, arguments=arguments, results=tuple(new[index] for index in self.results))


@dataclass(frozen=True)
class Carried:
    """A value [T, *row_shape], with T tokens, that is defined before an attention op and read after it.

    In a pipeline that is cut after this attention, one stage sends the value to the next.
    """

    value: int
    dtype: str  # name in torch
    row_shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The calls that a compiled callable makes. Values are numbered: first the inputs, then the results of steps."""

    arguments: tuple[str, ...]  # names of the callable's arguments, in order; inputs are parts of them
    inputs: tuple[Input, ...]
    steps: tuple[PlannedStep, ...]
    outputs: tuple[int, ...]
    carried: tuple[Carried, ...] = ()  # values with a row per token that outlive an attention

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The descriptions of the parameters among the plan's inputs, including packed and computed parameters."""
        return tuple(source for source in self.inputs if isinstance(source, Parameter))

    def piece_keys(self) -> tuple[str, ...]:
        """Return the keys of the pieces that the plan calls, each once, in the order of the first call."""
        return tuple(dict.fromkeys(step.piece for step in self.steps if step.piece))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        inputs = tuple(map(read_input, data["inputs"]))
        steps = tuple(
            PlannedStep(s["piece"], s["op"], tuple(s["arguments"]), tuple(s["results"])) for s in data["steps"]
        )
        carried = tuple(Carried(c["value"], c["dtype"], tuple(c["row_shape"])) for c in data["carried"])
        return Plan(tuple(data["arguments"]), inputs, steps, tuple(data["outputs"]), carried)


def read_input(item: dict[str, Any]) -> Input:
    """Return the input of a plan that `item`, parsed from JSON, describes."""
    return Source(**item) if "kind" in item else Parameter.from_json(item)


def distinct_calls(plan: Plan) -> Plan:
    """Return a shorter plan, for warming up, that keeps only the first of calls that are alike.

    The shorter plan loads all kernels of the whole plan, and allocates tensors of the same sizes, in less time, but
    computes something else. Calls are alike if they call the same piece, or the same op with equal constants on results
    of the same pieces. The results of the call that is kept replace those of the others. All ranks keep the same calls.
    """
    stand_ins = {index: index for index in range(len(plan.inputs))}
    makers: dict[int, Hashable] = {}
    kept: dict[Hashable, PlannedStep] = {}
    for step in plan.steps:
        like = kept.setdefault(_kind(plan, step, makers), step)
        stand_ins |= dict(zip(step.results, like.results, strict=True))
        makers |= {index: (step.piece or step.op, number) for number, index in enumerate(step.results)}
    defined = [index for step in kept.values() for index in step.results]
    new = {old: number for number, old in enumerate([*range(len(plan.inputs)), *defined])}
    numbers = {index: new[stand_in] for index, stand_in in stand_ins.items()}
    steps = tuple(step.renumbered(numbers) for step in kept.values())
    return Plan(plan.arguments, plan.inputs, steps, tuple(numbers[index] for index in plan.outputs))


def _kind(plan: Plan, step: PlannedStep, makers: Mapping[int, Hashable]) -> Hashable:
    def of_argument(argument: Mapping[str, Any]) -> Hashable:
        if "value" not in argument:
            return repr(argument["constant"])
        index = argument["value"]
        if index in makers:
            return makers[index]
        source = plan.inputs[index]
        # Inputs of different layers only differ by name.
        return source.kind if source.kind == "parameter" or source.element is not None else source

    return step.piece or (step.op, *map(of_argument, step.arguments))
