"""The plan of a compiled callable: which pieces and ops run in which order on which values. Plain JSON."""

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
    """A call of `piece` (a piece key) or of splitting op `op`.

    Arguments are {"value": index} or {"constant": c}; results are the indices of the values it defines.
    """

    piece: str | None
    op: str | None
    arguments: tuple[dict[str, Any], ...]
    results: tuple[int, ...]

    def renumbered(self, new: Mapping[int, int]) -> PlannedStep:
        """The same call with other indices for its values; `new` has one for each."""
        arguments = tuple({"value": new[a["value"]]} if "value" in a else a for a in self.arguments)
        return replace(self, arguments=arguments, results=tuple(new[index] for index in self.results))


@dataclass(frozen=True)
class Carried:
    """A value [T, *row_shape] that a step before an attention defines and one behind it reads: where the plan is cut
    there, it goes from one stage to the next. dtype: by its name in torch."""

    value: int
    dtype: str
    row_shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Value i is input i for the first len(inputs) values; steps define the others.

    arguments: the names of what the callable is given, in order, whose parts inputs are. carried: values with a row for
    each token that outlive an attention.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    steps: tuple[PlannedStep, ...]
    outputs: tuple[int, ...]
    carried: tuple[Carried, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the pieces, including packed and made ones."""
        return tuple(source for source in self.inputs if isinstance(source, Parameter))

    def piece_keys(self) -> tuple[str, ...]:
        """The unique pieces, in order of first use."""
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
    """Make a plan from its fields as JSON."""
    return Source(**item) if "kind" in item else Parameter.from_json(item)


# A plan with one call of each kind: it loads and allocates what the whole plan does, in the time of a few layers.


def distinct_calls(plan: Plan) -> Plan:
    """The plan without calls that repeat an earlier one, whose results replace theirs.

    Calls are equal if they call the same piece, which is compiled for the shapes of its arguments, or the same op with
    equal constants on values of the same pieces. Values do not matter, so all ranks leave out the same calls.
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
        # Inputs that each layer has differ by name.
        return source.kind if source.kind == "parameter" or source.element is not None else source

    return step.piece or (step.op, *map(of_argument, step.arguments))
