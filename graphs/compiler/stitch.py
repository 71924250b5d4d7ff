"""Bind a plan to its compiled pieces and to the parameters: one flat Python function, generated and readable.

The generated function names every value, calls the pieces with flat inputs and drops each value after its last
use. It costs about a microsecond a call; Dynamo's own entry with its guards costs 44.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from compiled_engine.attention.op import ATTENTION_OPS, OnAttention
from compiled_engine.attention.step_tensors import FORWARD_ARGUMENTS
from compiled_engine.graphs.compiler.plan import SPLITTING_OPS, Plan, PlannedStep
from compiled_engine.passes.graph_inputs import Source, derived
from compiled_engine.passes.rope_attend import in_two

# Takes ForwardArguments.
Forward = Callable[..., torch.Tensor]


def stitch(
    plan: Plan,
    pieces: Mapping[str, Callable[..., Any]],
    parameters: Mapping[str, torch.Tensor],
    on_attention: OnAttention | None = None,
) -> Forward:
    """The model's forward, from ForwardArguments to hidden states [T, D] or logits [T, V].

    on_attention: is called with the function and the arguments of an attention op instead of the function.
    """
    functions: dict[str, Callable[..., Any]] = SPLITTING_OPS
    if on_attention is not None:
        passed = {name: _passed_to(on_attention, function) for name, function in ATTENTION_OPS.items()}
        attention_passed = partial(in_two, passed["compiled_engine::attend"])
        functions = functions | passed | {"compiled_engine::rope_attend": attention_passed}
    namespace: dict[str, Any] = {_op_function(name): function for name, function in functions.items()}
    namespace |= {f"piece_{key}": pieces[key] for key in plan.piece_keys()}
    used = {argument.get("value") for step in plan.steps for argument in step.arguments} | {*plan.outputs}
    for index, source in enumerate(plan.inputs):
        if source.kind == "parameter" and index in used:
            namespace[f"parameter_{index}"] = derived(parameters[source.name], source.derivation)
    exec(compile(forward_source(plan), "<stitched forward>", "exec"), namespace)
    # Without its own name in its globals the function is not a cycle: dropping it frees the parameters at once.
    return namespace.pop("forward")


def _passed_to(on_attention: OnAttention, function: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments: on_attention(function, arguments)


def forward_source(plan: Plan) -> str:
    """Python source of the stitched forward."""
    names = [_input_name(index, source) for index, source in enumerate(plan.inputs)]
    names += [f"v{i}" for i in range(len(names), len(names) + sum(len(step.results) for step in plan.steps))]
    last_use = _last_uses(plan)
    heads = [source.name.partition(".")[0] for source in plan.inputs if source.kind in ("argument", "received")]
    lines = [f"def forward({', '.join(dict.fromkeys((*FORWARD_ARGUMENTS, *heads)))}):"]
    lines += [f"    {names[i]} = {source.expression}.shape[{source.dim}]" for i, source in _used_sizes(plan)]
    for number, step in enumerate(plan.steps):
        lines.append("    " + _call(step, names))
        dead = [names[i] for i in last_use.get(number, []) if i >= len(plan.inputs)]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {', '.join(names[index] for index in plan.outputs)}")
    return "\n".join(lines) + "\n"


def _input_name(index: int, source: Source) -> str:
    if source.kind in ("argument", "received"):
        return source.expression
    return f"parameter_{index}" if source.kind == "parameter" else f"size_{index}"


def _used_sizes(plan: Plan) -> list[tuple[int, Source]]:
    used = {a["value"] for step in plan.steps for a in step.arguments if "value" in a}
    return [(i, source) for i, source in enumerate(plan.inputs) if source.kind == "size" and i in used]


def _last_uses(plan: Plan) -> dict[int, list[int]]:
    """For each step, the values that nothing after it reads."""
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
