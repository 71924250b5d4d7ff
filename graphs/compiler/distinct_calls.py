"""A plan with one call of each kind: it loads and allocates what the whole plan does, in the time of a few layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from compiled_engine.graphs.compiler.plan import Plan, PlannedStep


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
