"""Linears that read the same input become one: q, k and v; gate and up.

Why: at decode sizes a linear costs about its weights' bytes plus a launch, and one large matrix uses the memory
bandwidth better than several small ones. The weights are packed before they are loaded, so the loader writes
each once into its slice and no copy is ever made. silu_mul needs it, so a gate and its up are apart from others that
read the same input, as those of attention do in parallel blocks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import (
    ACTIVATIONS,
    aten,
    emit,
    emit_item,
    factors,
    fake_mode_of,
    is_call,
    only_user,
)
from compiled_engine.passes.framework.parameter import packed
from compiled_engine.passes.linear.linears import Linear, emit_linear, linear_of, multiplied_values


class MergeLinears(GraphPass):
    name = "merge_linears"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """One for each value that several matrices are multiplied with."""
        return sum(1 for count in multiplied_values(graph).values() if count > 1)

    def run(self, graph: fx.Graph) -> PassResult:
        by_input: dict[fx.Node, list[Linear]] = defaultdict(list)
        for node in graph.nodes:
            if (linear := linear_of(node)) is not None:
                by_input[linear.x].append(linear)
        matches = 0
        near_misses: list[str] = []
        replacements: list[Replacement] = []
        for group in by_input.values():
            if len(group) < 2:
                continue
            found = [(part, _obstacle(part)) for part in _gates_apart(group)]
            matches += all(reason is None for _, reason in found)
            for part, reason in found:
                if reason is None:
                    replacements += _merge(graph, part)
                else:
                    names = ", ".join(source_of(linear.weight).name for linear in part)
                    near_misses.append(f"{names}: {reason}")
        return PassResult(matches, tuple(near_misses), tuple(replacements))


def _obstacle(group: list[Linear]) -> str | None:
    if not all(linear.is_plain for linear in group):
        return f"their weights are stored as {', '.join(sorted({linear.format for linear in group}))}"
    parameters = [p for linear in group for p in (linear.weight, linear.bias) if p is not None]
    if any(len(parameter.users) > 1 for parameter in parameters):
        return "a parameter is used elsewhere too"
    if any(parameter_of(parameter).make for parameter in parameters):
        return "a parameter is derived from another"
    if len({linear.bias is None for linear in group}) > 1:
        return "only some have a bias"
    if any(len(linear.operand.users) > 1 for linear in group):
        return "a transposed weight is used elsewhere too"
    if len({source_of(linear.weight).name.count(".") for linear in group}) > 1:
        return "their names differ in depth"
    return None


def _gates_apart(group: list[Linear]) -> list[list[Linear]]:
    """The group, or the two linears of a gated product, and the others if these are several."""
    for gate in group:
        activation: Any = only_user(gate.node)
        product = only_user(activation) if is_call(activation, *ACTIVATIONS) else None
        ups = [linear for linear in group if any(other is linear.node for _, other in factors(product))]
        if ups:
            others = [linear for linear in group if linear not in (gate, ups[0])]
            return [part for part in (others, [x for x in group if x not in others]) if len(part) > 1]
    return [group]


def _merge(graph: fx.Graph, group: list[Linear]) -> list[Replacement]:
    first = group[0].node
    weight = _pack(graph, [linear.weight for linear in group])
    biases = [linear.bias for linear in group if linear.bias is not None]
    bias = _pack(graph, biases) if biases else None
    sizes = [linear.weight.meta["val"].shape[0] for linear in group]
    with graph.inserting_before(first):
        merged = emit_linear(graph, group[0].x, weight, bias)
        parts = emit(graph, aten.split_with_sizes.default, merged, sizes, -1)
        outputs = [emit_item(graph, parts, i) for i in range(len(group))]
    replacements = [Replacement(x.node.name, output) for x, output in zip(group, outputs, strict=True)]
    for linear, output in zip(group, outputs, strict=True):
        linear.node.replace_all_uses_with(output)
        graph.erase_node(linear.node)
        graph.erase_node(linear.operand)
        graph.erase_node(linear.weight)
        if linear.bias is not None:
            graph.erase_node(linear.bias)
    return replacements


def _pack(graph: fx.Graph, parameters: list[fx.Node]) -> fx.Node:
    """A placeholder for the parameters' concatenation along dimension 0."""
    members = tuple(map(parameter_of, parameters))
    values = [parameter.meta["val"] for parameter in parameters]
    with graph.inserting_before(parameters[0]):
        placeholder = graph.placeholder(f"packed_{parameters[0].name}")
    with fake_mode_of(values):
        placeholder.meta["val"] = torch.cat(values)
    placeholder.meta["source"] = packed(_packed_name(tuple(member.name for member in members)), members)
    return placeholder


def _packed_name(names: tuple[str, ...]) -> str:
    """model.layers.0.self_attn.{q_proj,k_proj,v_proj}.weight"""
    split = [name.split(".") for name in names]
    steps = [
        column[0] if len(set(column)) == 1 else "{" + ",".join(column) + "}" for column in zip(*split, strict=True)
    ]
    return ".".join(steps)
