"""Arithmetic on a parameter alone is done once, when weights are bound: Gemma's 1 + weight, a weight in another dtype.

Why: textbook norms multiply by their weight; that others add one to it first is a matter of how they are stored. The
result is an input of the graph, a parameter with a derivation, which graphs/compiler/stitch.py computes.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from compiled_engine.passes.graph_inputs import Derivation, source_of
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import arg, aten
from compiled_engine.passes.structure import Structure
from compiled_engine.passes.structure_counts import is_derivation

_STEPS = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten._to_copy.default: "to"}


class FoldParameters(GraphPass):
    name = "fold_parameters"

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.derived_parameters

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        derived: dict[tuple[fx.Node, Derivation], fx.Node] = {}
        for node in list(graph.nodes):
            if not is_derivation(node):
                continue
            parameter = arg(node, 0)
            step = (_STEPS[node.target], _operand(node))  # type: ignore[index]
            source = source_of(parameter)
            key = parameter, (*source.derivation, step)
            if key not in derived:
                with graph.inserting_after(parameter):
                    derived[key] = graph.placeholder(f"derived_{node.name}")
                derived[key].meta["val"] = node.meta["val"]
                derived[key].meta["source"] = replace(source, derivation=key[1])
            node.replace_all_uses_with(derived[key])
            graph.erase_node(node)
            replacements.append(Replacement(node.name, derived[key]))
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and source_of(placeholder).kind == "parameter":
                graph.erase_node(placeholder)
        return PassResult(len(replacements), (), tuple(replacements))


def _operand(node: fx.Node) -> float | str:
    if len(node.args) > 1:
        return float(arg(node, 1))
    return str(node.kwargs["dtype"]).removeprefix("torch.")
