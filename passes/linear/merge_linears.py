"""Merges linears with the same input into one: q, k and v; gate and up.

Why: in decode steps a linear takes about as long as reading its weights, plus a launch, and one large matrix uses
memory bandwidth better than several small ones. The packed weight is allocated before weights are loaded, and the
loader writes each weight to its slice, without copies. silu_mul needs gate and up merged with each other alone, so they
are kept apart from other linears of the same input, such as attention's in parallel blocks.

For quantised weights, codes and scales are packed. If the weights' tiles have different numbers of rows, scales are
repeated for smaller tiles, so nothing is rounded a second time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import zip_longest
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
from compiled_engine.passes.framework.parameter import Parameter, made, packed
from compiled_engine.passes.linear.linears import Linear, Quantised, emit_linear, linear_of, multiplied_values


class MergeLinears(GraphPass):
    name = "merge_linears"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that are multiplied by several weight matrices: one match each."""
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
            apart = _gates_apart(group)
            found = [(alike, _obstacle(alike)) for part in apart for alike in _formats_apart(part)]
            if len(found) > len(apart):
                near_misses.append(f"{', '.join(source_of(x.weight).name for x in group)}: their schemes differ")
            matches += len(found) == len(apart) and all(reason is None for _, reason in found)
            found = [(part, reason) for part, reason in found if len(part) > 1]
            for part, reason in found:
                if reason is None:
                    replacements += _merge(graph, part)
                else:
                    names = ", ".join(source_of(linear.weight).name for linear in part)
                    near_misses.append(f"{names}: {reason}")
        return PassResult(matches, tuple(near_misses), tuple(replacements))


def _obstacle(group: list[Linear]) -> str | None:
    if not all(linear.is_known for linear in group):
        return f"their weights are stored as {', '.join(sorted({linear.format for linear in group}))}"
    parameters = [p for linear in group for p in linear.parameters]
    if any(len(parameter.users) > 1 for parameter in parameters):
        return "a parameter is used elsewhere too"
    own = [p for linear in group for p in (None if linear.quantised else linear.weight, linear.bias) if p is not None]
    if any(parameter_of(parameter).make for parameter in own):
        return "a parameter is derived from another"
    if len({linear.bias is None for linear in group}) > 1:
        return "only some have a bias"
    if any(len(linear.operand.users) > 1 for linear in group):
        return "a transposed weight is used elsewhere too"
    return None


def _gates_apart(group: list[Linear]) -> list[list[Linear]]:
    """Separate the linears of gate and up, if any, from the other linears with the same input.

    Returns the resulting groups that have more than one linear.
    """
    for gate in group:
        activation: Any = only_user(gate.node)
        product = only_user(activation) if is_call(activation, *ACTIVATIONS) else None
        ups = [linear for linear in group if any(other is linear.node for _, other in factors(product))]
        if ups:
            others = [linear for linear in group if linear not in (gate, ups[0])]
            return [part for part in (others, [x for x in group if x not in others]) if len(part) > 1]
    return [group]


def _formats_apart(group: list[Linear]) -> list[list[Linear]]:
    """Divide linears into groups with the same weight format and scheme. Numbers of rows per tile may differ."""
    found: dict[Any, list[Linear]] = defaultdict(list)
    for linear in group:
        scheme = linear.quantised and linear.quantised.scheme
        found[linear.format, scheme and scheme._replace(weight=scheme.weight._replace(rows=0))].append(linear)
    return list(found.values())


def _merge(graph: fx.Graph, group: list[Linear]) -> list[Replacement]:
    first = group[0].node
    weight = _pack(graph, [linear.weight for linear in group])
    biases = [linear.bias for linear in group if linear.bias is not None]
    bias = _pack(graph, biases) if biases else None
    quantised = _merge_quantised(graph, [linear.quantised for linear in group if linear.quantised])
    sizes = [linear.weight.meta["val"].shape[0] for linear in group]
    with graph.inserting_before(first):
        merged = emit_linear(graph, group[0].x, weight, bias, quantised)
        parts = emit(graph, aten.split_with_sizes.default, merged, sizes, -1)
        outputs = [emit_item(graph, parts, i) for i in range(len(group))]
    replacements = [Replacement(x.node.name, output) for x, output in zip(group, outputs, strict=True)]
    for linear, output in zip(group, outputs, strict=True):
        linear.node.replace_all_uses_with(output)
        _keep_views(output)
        graph.erase_node(linear.node)
        for node in dict.fromkeys((linear.operand, *linear.parameters)):
            graph.erase_node(node)
    return replacements


def _keep_views(value: fx.Node) -> None:
    """Replace views of a value by reshapes, which copy, where the value's strides do not allow the view.

    The value is a slice of a merged linear's result, so its rows are not contiguous.
    """
    for user in [user for user in value.users if is_call(user, aten.view.default)]:
        arguments = fx.map_arg(user.args, lambda node: node.meta["val"])
        with fake_mode_of(value.meta["val"]):
            try:
                user.meta["val"] = user.target(*arguments)  # type: ignore[operator]
            except (RuntimeError, ValueError):
                user.target = aten.reshape.default
                continue
        _keep_views(user)


def _merge_quantised(graph: fx.Graph, group: list[Quantised]) -> Quantised | None:
    """Merge the scales, zero points, input scales and orders of columns of linears, and return the merged ones.

    Each of these becomes a new placeholder of the graph. Returns None if `group` is empty, which stands for weights
    that are not quantised.
    """
    if not group:
        return None
    rows = math.gcd(*(each.scheme.weight.rows for each in group))
    repeats = [each.scheme.weight.rows // rows for each in group]
    zeros = [each.zeros for each in group if each.zeros is not None]
    inputs = [each.input_scale for each in group if each.input_scale is not None]
    columns = [each.columns for each in group if each.columns is not None]
    scheme = group[0].scheme._replace(weight=group[0].scheme.weight._replace(rows=rows))
    return Quantised(
        _pack(graph, [each.scales for each in group], repeats),
        _pack(graph, zeros, repeats) if zeros else None,
        _the_same(_pack(graph, inputs)) if inputs else None,
        scheme,
        _the_same(_pack(graph, columns)) if columns else None,
    )


def _pack(graph: fx.Graph, parameters: list[fx.Node], repeats: list[int] | None = None) -> fx.Node:
    """Insert a placeholder for the parameters, concatenated along dimension 0, and return the placeholder.

    repeats: for each parameter, how often each of its rows is repeated; None for no repetition.
    """
    members = [parameter_of(parameter) for parameter in parameters]
    name = _packed_name(tuple(member.name for member in members))
    values = [parameter.meta["val"] for parameter in parameters]
    with fake_mode_of(values):
        for place, count in enumerate(repeats or ()):
            if count > 1:
                values[place] = values[place].repeat_interleave(count, 0)
                members[place] = made(members[place], "repeat_rows", count, values[place])
        value = torch.cat(values)
    with graph.inserting_before(parameters[0]):
        placeholder = graph.placeholder(f"packed_{parameters[0].name}")
    placeholder.meta |= {"val": value, "source": packed(name, tuple(members))}
    return placeholder


def _the_same(placeholder: fx.Node) -> fx.Node:
    """Change a placeholder, which has one row for each merged linear, to have a single row, and return it.

    Loading will fail if the rows are not equal.
    """
    source: Parameter = parameter_of(placeholder)
    placeholder.meta["val"] = placeholder.meta["val"][:1]
    step = ("the_same", source.name)
    placeholder.meta["source"] = replace(source, shape=(1, *source.shape[1:]), make=(step,))
    return placeholder


def _packed_name(names: tuple[str, ...]) -> str:
    """Return one name for several parameters, such as model.layers.0.self_attn.{q_proj,k_proj,v_proj}.weight."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) > 1:  # {q_proj,forget_gate.f_a_proj}
        before, after = _num_equal(split), _num_equal([parts[::-1] for parts in split])
        after = min(after, min(map(len, split)) - before)  # of model.model.w and model.w
        split = [[*x[:before], ".".join(x[before : len(x) - after]), *x[len(x) - after :]] for x in split]
    steps = [
        column[0] if len(set(column)) == 1 else "{" + ",".join(column) + "}" for column in zip(*split, strict=True)
    ]
    return ".".join(steps)


def _num_equal(rows: list[list[str]]) -> int:
    """Return how many items at the beginning of the rows are equal in all rows. The rows must not all be equal."""
    return next(i for i, column in enumerate(zip_longest(*rows)) if len(set(column)) > 1)
