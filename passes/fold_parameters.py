"""Arithmetic on a parameter alone is done when weights are loaded: Gemma's 1 + weight, a weight in another dtype.

Why: textbook norms multiply by their weight; that others add one to it first is a matter of how they are stored. The
result is an input of the graph, a parameter that the loader makes of the one in the checkpoint.
"""

from __future__ import annotations

from torch import fx

from compiled_engine.passes.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import arg, aten
from compiled_engine.passes.parameter import Parameter, made
from compiled_engine.passes.structure import Structure
from compiled_engine.passes.structure_counts import is_derivation

_STEPS = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten._to_copy.default: "to"}


class FoldParameters(GraphPass):
    name = "fold_parameters"

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.derived_parameters

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        derived: dict[Parameter, fx.Node] = {}
        for node in list(graph.nodes):
            if not is_derivation(node):
                continue
            parameter = arg(node, 0)
            step, value = _STEPS[node.target], node.meta["val"]  # type: ignore[index]
            result = made(parameter_of(parameter), step, _operand(node), value)
            if result not in derived:
                with graph.inserting_after(parameter):
                    derived[result] = graph.placeholder(f"derived_{node.name}")
                derived[result].meta |= {"val": value, "source": result}
            node.replace_all_uses_with(derived[result])
            graph.erase_node(node)
            replacements.append(Replacement(node.name, derived[result]))
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and is_parameter(placeholder):
                graph.erase_node(placeholder)
        return PassResult(len(replacements), (), tuple(replacements))


def _operand(node: fx.Node) -> float | str:
    if len(node.args) > 1:
        return float(arg(node, 1))
    return str(node.kwargs["dtype"]).removeprefix("torch.")
