"""Arithmetic on a parameter alone is done when weights are loaded: Gemma's 1 + weight, a weight in another dtype.

Why: textbook norms multiply by their weight; that others add one to it first is a matter of how they are stored. The
result is an input of the graph, a parameter that the loader makes of the one in the checkpoint.
"""

from __future__ import annotations

from torch import fx

from compiled_engine.passes.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import arg, aten, factors, is_call, only_user
from compiled_engine.passes.norms import is_scaled_by_root
from compiled_engine.passes.parameter import Parameter, made

_STEPS = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten._to_copy.default: "to"}


class FoldParameters(GraphPass):
    name = "fold_parameters"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return sum(map(_is_derivation, graph.nodes))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        derived: dict[Parameter, fx.Node] = {}
        for node in list(graph.nodes):
            if not _is_derivation(node):
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


def _is_derivation(node: fx.Node) -> bool:
    """Return whether the node is a constant plus or times a vector of parameters, or a cast of one.

    A norm's operations on its weight are part of the norm.
    """
    last = node
    while (user := only_user(last)) is not None and is_call(user, aten.add.Tensor, aten._to_copy.default):
        last = user
    if last is not node or only_user(node) is not None:
        product = only_user(last)
        if any(factor is last and is_scaled_by_root(other) for factor, other in factors(product)):
            return False
    if not is_call(node, aten.add.Tensor, aten.mul.Tensor, aten._to_copy.default):
        return False
    parameter = arg(node, 0)
    constants = all(isinstance(other, int | float) for other in node.args[1:])
    is_vector = is_parameter(parameter) and parameter.meta["val"].dim() <= 1
    return constants and is_vector and not set(node.kwargs) - {"dtype"}
