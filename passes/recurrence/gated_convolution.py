"""Moves the multiplications before and after a short convolution into the convolution's op.

The first multiplies the convolution's input by a factor, the second its result by a gate, element by element.

Why: each multiplication would be a kernel that reads and writes the whole activation. In a decode step such a kernel
takes as long to start as a small linear, and the linear after it cannot prefetch its weight. Without these
multiplications, the parts into which the graph is split have no pointwise op left, and need no compilation.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import emit_named, factors, named, rewrite_calls
from compiled_engine.recurrence.op import CONV_STATE


class GatedConvolution(GraphPass):
    name = "gated_convolution"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of convolutions with a multiplication that can move into their op: one match each."""
        return sum(isinstance(_match(call), _Match) for call in graph.find_nodes(op="call_function", target=CONV_STATE))

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, CONV_STATE, _rewrite)


class _Match(NamedTuple):
    """The multiplications before and after a convolution that can move into its op."""

    operands: tuple[fx.Node, ...]  # of the input's multiplication; empty without one
    product: fx.Node | None  # the multiplication of the result by its gate, or None
    gate: fx.Node | None


def _match(call: fx.Node) -> _Match | str | None:
    """Return the multiplications before and after a convolution if they can move into the convolution's op.

    Returns None if there are no multiplications. If there are some that cannot move, returns the reason as text.
    """
    arguments = named(call)
    x, out = arguments["x_TD"], arguments["out_TD"]
    operands = next(iter(factors(x)), ())
    of_result = [(user, gate) for user in out.users for result, gate in factors(user) if result is out]
    if not (operands or of_result):
        return None
    product, gate = next(iter(of_result), (None, None))
    if operands and set(x.users) != {call, out}:
        return "its input is read elsewhere too"
    if product is not None and set(out.users) != {call, product}:
        return "its result is read elsewhere too"
    if any(each is out or call < each for _, each in of_result):
        return "its gate is computed after it"
    values = [each.meta["val"] for each in (*operands, *(each for _, each in of_result))]
    if any((value.shape, value.dtype) != (x.meta["val"].shape, x.meta["val"].dtype) for value in values):
        return "its factors differ in shape or dtype"
    return _Match(operands, product, gate)


def _rewrite(graph: fx.Graph, call: fx.Node) -> list[Replacement] | str | None:
    match = _match(call)
    if not isinstance(match, _Match):
        return match
    arguments = named(call)
    replaced = out = arguments["out_TD"]
    if match.operands:
        arguments["x_TD"], arguments["factor_TD"] = match.operands
    if match.product is not None:
        arguments["gate_TD"], replaced = match.gate, match.product
    with graph.inserting_before(call):
        new_out = graph.node_copy(out, lambda like: arguments["x_TD"])
        emit_named(graph, CONV_STATE, arguments | {"out_TD": new_out})
    graph.erase_node(call)
    replaced.replace_all_uses_with(new_out)
    return [Replacement(replaced.name, new_out)]
