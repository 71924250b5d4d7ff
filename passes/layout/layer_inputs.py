"""Finds a model's layers in its parameter names and its graph, and the hidden states that enter a layer.

A layer's first op with a parameter is a norm, or a linear in post-norm models. The input of this op is the layer's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.linear.linears import linear_of
from compiled_engine.passes.norm.norms import norm_of


def layer_stack(names: Iterable[str]) -> str:
    """Return the path of a model's list of layers, such as model.layers, found from its parameter names.

    The list is the path that the most different numbers follow, as in model.layers.0.mlp and model.layers.1.mlp.
    Returns "" if no name has a number.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := re.match(r"(?P<path>.+?)\.(?P<number>\d+)\.", name):
            numbers[found["path"]].add(found["number"])
    return max(numbers, key=lambda path: len(numbers[path]), default="")


def entering(graph: fx.Graph, prefix: str) -> fx.Node | str:
    """Return the hidden state that enters the layer whose parameters have this prefix, or why it was not found.

    No pass that fuses ops may have run on the graph.
    """
    placeholders = graph.find_nodes(op="placeholder")
    # Values computed from parameters of the layer alone -> these parameters.
    own = {node: {node} for node in placeholders if is_parameter(node) and parameter_of(node).name.startswith(prefix)}
    first: fx.Node | None = None
    read: set[fx.Node] = set()
    for node in graph.nodes:
        if first is None and (found := [own[value] for value in node.all_input_nodes if value in own]):
            if len(found) == len(node.all_input_nodes):
                own[node] = set[fx.Node]().union(*found)
                continue
            first, read = node, set[fx.Node]().union(*found)
        if first is None:
            continue
        norm, linear = norm_of(node), linear_of(node)
        if norm is not None and norm.weight in read:
            return norm.x
        if linear is not None and linear.weight in read:
            return linear.x
    if first is None:
        return f"no op reads a parameter {prefix}*"
    return f"{first.name}, the first op with a parameter, is part of no norm and no linear that is known"


def stack_of(graph: fx.Graph) -> str:
    """Return the path of the list of layers, such as model.layers, in the model that the graph computes."""
    return layer_stack(parameter_of(node).name for node in graph.find_nodes(op="placeholder") if is_parameter(node))
