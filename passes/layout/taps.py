"""The hidden states that enter chosen layers become further outputs of the graph, for a head that drafts from them.

EAGLE-3 (Li, Wei, Zhang and Zhang, 2025) reads the residual stream in front of three layers. No model file knows of it:
the first op of a layer with a parameter is a norm, or a linear in models that norm behind their linears, and the value
is what this op reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import arg
from compiled_engine.passes.linear.linears import linear_of
from compiled_engine.passes.norm.norms import norm_of


class Taps(GraphPass):
    """path: of the stack of layers in the model. layers: the tapped ones, in the order of the new outputs, [T, D] each.

    Comes after the layers are repeated and divided, and before all passes that fuse.
    """

    name = "taps"
    required = True  # whoever calls the graph counts on its outputs

    def __init__(self, path: str, layers: Sequence[int]) -> None:
        self._path, self._layers = path, tuple(layers)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(self._layers)

    def run(self, graph: fx.Graph) -> PassResult:
        taps, near_misses, notes = [], [], []
        for layer in self._layers:
            found = self._entering(graph, f"{self._path}.{layer}.")
            if isinstance(found, str):
                near_misses.append(f"layer {layer}: {found}")
            else:
                taps.append(found)
                notes.append(f"output {len(taps)} behind the results: {found.name}, which enters {self._path}.{layer}")
        if not near_misses:
            output = graph.output_node()
            output.args = ((*arg(output, 0), *taps),)
        return PassResult(len(taps), tuple(near_misses), (), tuple(notes))

    def _entering(self, graph: fx.Graph, prefix: str) -> fx.Node | str:
        """Return the value that the layer with these parameters reads, or why there is none that is known."""
        placeholders = graph.find_nodes(op="placeholder")
        # For each parameter of the layer, and each value of these alone, the parameters in it.
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


def _name(placeholder: fx.Node) -> str:
    return parameter_of(placeholder).name
