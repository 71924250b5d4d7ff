"""Adds the hidden states that enter chosen layers to the graph's outputs, for a draft head.

EAGLE-3 (Li, Wei, Zhang and Zhang, 2025) reads the residual stream before three layers. Model files need no change for
it, see layer_inputs.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import arg
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.layout.layer_inputs import entering, stack_of


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
        path = stack_of(graph)
        for layer in self._layers:
            found = entering(graph, f"{path}.{layer}.")
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
        """Check that each returned hidden state is all that its layer and later layers read of earlier layers.

        Raises VerificationError if it is not. Returns the number of hidden states checked.
        """
        path = stack_of(graph)
        for layer, aux_hidden_state in zip(
            self._layers, arg(graph.output_node(), 0)[-len(self._layers) :], strict=True
        ):
            crossing = _crossing(graph, path, layer, aux_hidden_state)
            if crossing - {aux_hidden_state}:
                names = ", ".join(sorted(node.name for node in crossing))
                gets = f"{path}.{layer} gets {names} from before"
                raise VerificationError(f"pass {self.name}: {gets}, and {aux_hidden_state.name} is returned")
        return len(self._layers)


def _crossing(graph: fx.Graph, path: str, layer: int, aux_hidden_state: fx.Node) -> set[fx.Node]:
    """Return the values that depend on parameters of layers before `layer` and are read in this layer or after it.

    path: path of the model's list of layers, such as model.layers. An op that reads `aux_hidden_state` counts as part
    of the layer `layer`.
    """
    numbered = re.compile(rf"{re.escape(path)}\.(?P<number>\d+)\.")
    early: set[fx.Node] = set()
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if is_parameter(node):
            found = numbered.match(parameter_of(node).name)
            if found is not None:
                (early if int(found["number"]) < layer else late).add(node)
        elif node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function" and not early.isdisjoint(node.all_input_nodes):
            (late if aux_hidden_state in node.all_input_nodes else early).add(node)
    read = {value for node in late for value in node.all_input_nodes}
    return {value for value in read & early if value.op == "call_function"}
