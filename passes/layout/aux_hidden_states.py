"""Adds the hidden states that enter chosen layers to the graph's outputs, for a draft head.

EAGLE-3 (Li, Wei, Zhang and Zhang, 2025) reads the residual stream before three layers. Model files need no change for
it. A layer's first op that reads a parameter is a norm or, in post-norm models, a linear. The input of this op is the
hidden state to return.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import arg
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.linears import linear_of
from compiled_engine.passes.norm.norms import norm_of


def layer_stack(names: Iterable[str]) -> str:
    """Return the path of a model's list of layers, such as model.layers, found from its parameter names.

    It is the path that most distinct numbers follow, as in model.layers.0.mlp and model.layers.1.mlp. Returns "" if no
    name has a number.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := re.match(r"(?P<path>.+?)\.(?P<number>\d+)\.", name):
            numbers[found["path"]].add(found["number"])
    return max(numbers, key=lambda path: len(numbers[path]), default="")


class AuxHiddenStates(GraphPass):
    """Appends the inputs of the layers with these indices, [T, D] each, to the graph's outputs.

    Runs after the layers that were not traced have been added (see repeated_layers) and after tensor_parallel, and
    before all passes that fuse ops.
    """

    name = "aux_hidden_states"
    required = True  # callers of the graph need its outputs

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(self._layers)

    def run(self, graph: fx.Graph) -> PassResult:
        aux_hidden_states, near_misses, notes = [], [], []
        path = _stack(graph)
        for layer in self._layers:
            found = self._entering(graph, f"{path}.{layer}.")
            if isinstance(found, str):
                near_misses.append(f"layer {layer}: {found}")
            else:
                aux_hidden_states.append(found)
                notes.append(
                    f"output {len(aux_hidden_states)} behind the results: {found.name}, which enters {path}.{layer}"
                )
        if not near_misses:
            output = graph.output_node()
            output.args = ((*arg(output, 0), *aux_hidden_states),)
        return PassResult(len(aux_hidden_states), tuple(near_misses), (), tuple(notes))

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Check that each layer reads no other value computed before it than the hidden state returned for it.

        Raises VerificationError if it does. Returns the number of layers.
        """
        path = _stack(graph)
        for layer, aux_hidden_state in zip(
            self._layers, arg(graph.output_node(), 0)[-len(self._layers) :], strict=True
        ):
            crossing = _crossing(graph, path, layer, aux_hidden_state)
            if crossing - {aux_hidden_state}:
                names = ", ".join(sorted(node.name for node in crossing))
                gets = f"{path}.{layer} gets {names} from before"
                raise VerificationError(f"pass {self.name}: {gets}, and {aux_hidden_state.name} is returned")
        return len(self._layers)

    def _entering(self, graph: fx.Graph, prefix: str) -> fx.Node | str:
        """Return the hidden state that enters the layer whose parameters have this prefix, or why it was not found."""
        placeholders = graph.find_nodes(op="placeholder")
        # Values computed from parameters of the layer alone -> these parameters.
        own = {node: {node} for node in placeholders if is_parameter(node) and _name(node).startswith(prefix)}
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


def _stack(graph: fx.Graph) -> str:
    return layer_stack(_name(node) for node in graph.find_nodes(op="placeholder") if is_parameter(node))


def _crossing(graph: fx.Graph, path: str, layer: int, aux_hidden_state: fx.Node) -> set[fx.Node]:
    """Return the values that are computed before layer `layer` and read in it or after it.

    path: of the model's layers, see `layer_stack`. An op that reads `aux_hidden_state` counts as part of the layer.
    """
    numbered = re.compile(rf"{re.escape(path)}\.(?P<number>\d+)\.")
    early: set[fx.Node] = set()
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if is_parameter(node):
            found = numbered.match(_name(node))
            if found is not None:
                (early if int(found["number"]) < layer else late).add(node)
        elif node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function" and not early.isdisjoint(node.all_input_nodes):
            (late if aux_hidden_state in node.all_input_nodes else early).add(node)
    read = {value for node in late for value in node.all_input_nodes}
    return {value for value in read & early if value.op == "call_function"}


def _name(placeholder: fx.Node) -> str:
    return parameter_of(placeholder).name
