"""Generates a Python function that runs a plan, with the plan's pieces and parameters bound to it.

The function calls pieces and splitting ops one after another, and drops each value after its last use. Unlike Dynamo's
entry point, it checks no guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from compiled_engine.attention.op import OnAttention, attend
from compiled_engine.graphs.compiler.plan import Input, Plan, PlannedStep
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import SplittingOp
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.registry import splitting_ops

# Takes its plan's arguments (for a step ForwardArguments), and returns one output or a tuple of several.
Forward = Callable[..., Any]


def stitch(
    plan: Plan,
    pieces: Mapping[str, Callable[..., Any]],
    parameters: Mapping[str, torch.Tensor],
    on_attention: OnAttention | None = None,
) -> Forward:
    """Return a function that takes the plan's arguments, runs the plan, and returns its output or a tuple of outputs.

    pieces: key -> function. parameters: name -> tensor. on_attention: called in place of the function of each attention
    op, with that function and its arguments; None: the functions are called directly.
    """
    namespace: dict[str, Any] = {_op_function(op.name): _called(op, on_attention) for op in splitting_ops().values()}
    namespace |= {f"piece_{key}": pieces[key] for key in plan.piece_keys()}
    used = {argument.get("value") for step in plan.steps for argument in step.arguments} | {*plan.outputs}
    for index, source in enumerate(plan.inputs):
        if source.kind == "parameter" and index in used:
            namespace[f"parameter_{index}"] = parameters[source.name]
    exec(compile(forward_source(plan), "<stitched forward>", "exec"), namespace)
    # The function's globals must not contain itself: without the cycle, dropping it frees the parameters at once.
    return namespace.pop("forward")


def _called(op: SplittingOp, on_attention: OnAttention | None) -> Callable[..., Any]:
    """Return the function to call for a splitting op; for attention, a function that calls `on_attention` if given."""
    if on_attention is None or not op.attends:
        return op.function
    attention = attend if op.around else op.function

    def passed(*arguments: Any) -> None:
        on_attention(attention, arguments)

    return op.around(passed) if op.around else passed


def forward_source(plan: Plan) -> str:
    """Return the Python source of the function `forward` that runs the plan."""
    names = [_input_name(index, source) for index, source in enumerate(plan.inputs)]
    names += [f"v{i}" for i in range(len(names), len(names) + sum(len(step.results) for step in plan.steps))]
    last_use = _last_uses(plan)
    lines = [f"def forward({', '.join(plan.arguments)}):"]
    lines += [f"    {names[i]} = {source.expression}.shape[{source.dim}]" for i, source in _used_sizes(plan)]
    for number, step in enumerate(plan.steps):
        lines.append("    " + _call(step, names))
        dead = [names[i] for i in last_use.get(number, []) if i >= len(plan.inputs)]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {', '.join(names[index] for index in plan.outputs)}")
    return "\n".join(lines) + "\n"


def _input_name(index: int, source: Input) -> str:
    if isinstance(source, Parameter):
        return f"parameter_{index}"
    return f"size_{index}" if source.kind == "size" else source.expression


def _used_sizes(plan: Plan) -> list[tuple[int, Source]]:
    used = {a["value"] for step in plan.steps for a in step.arguments if "value" in a}
    given = [(i, source) for i, source in enumerate(plan.inputs) if isinstance(source, Source) and i in used]
    return [(i, source) for i, source in given if source.kind == "size"]


def _last_uses(plan: Plan) -> dict[int, list[int]]:
    """Return, by the number of a step, the indices of the values that are last needed by this step.

    Outputs of the plan are left out, since they are returned.
    """
    last: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        for index in [*step.results, *(a["value"] for a in step.arguments if "value" in a)]:
            last[index] = number
    by_step: dict[int, list[int]] = {}
    for index, number in last.items():
        if index not in plan.outputs:
            by_step.setdefault(number, []).append(index)
    return by_step


def _op_function(op: str) -> str:
    return op.replace("::", "_")


def _call(step: PlannedStep, names: list[str]) -> str:
    arguments = ", ".join(names[a["value"]] if "value" in a else repr(a["constant"]) for a in step.arguments)
    if step.op is not None:
        returned = "".join(f"{names[i]} = " for i in step.results)
        return f"{returned}{_op_function(step.op)}({arguments})"
    targets = "".join(f"{names[i]}, " for i in step.results)
    return f"{targets}= piece_{step.piece}({arguments})"
