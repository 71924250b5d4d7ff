"""Products around a short convolution become part of its op: of its input with a factor, and of its result with a gate.

Why: each would be a kernel of its own that reads and writes the whole activation, for a few multiplications. In a
decode such a kernel takes as long to start as a small linear, and the linear after it cannot fetch its weight ahead.
Without them no pointwise op is left in the pieces, which then need no compiling.
"""

from __future__ import annotations

import itertools

from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import emit_named, factors, named, rewrite_calls
from compiled_engine.recurrence.op import CONV_STATE


class GatedConvolution(GraphPass):
    name = "gated_convolution"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """One for each convolution with a product on either side. A factor of another shape or a gate that is computed
        later would break it: no family has one."""
        calls = map(named, graph.find_nodes(op="call_function", target=CONV_STATE))
        return sum(bool(factors(call["x_TD"]) or _products(call["out_TD"])) for call in calls)

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, CONV_STATE, _rewrite)


def _rewrite(graph: fx.Graph, call: fx.Node) -> list[Replacement] | str | None:
    arguments = named(call)
    x, out = arguments["x_TD"], arguments["out_TD"]
    of_input = factors(x)[:1]
    of_result = [(product, gate) for product in _products(out) for result, gate in factors(product) if result is out]
    if not (of_input or of_result):
        return None
    if of_input and set(x.users) != {call, out}:
        return "its input is read elsewhere too"
    if of_result and set(out.users) != {call, of_result[0][0]}:
        return "its result is read elsewhere too"
    if any(gate is out or call < gate for _, gate in of_result):
        return "its gate is computed after it"
    values = [each.meta["val"] for each in (*itertools.chain(*of_input), *(gate for _, gate in of_result))]
    if any((value.shape, value.dtype) != (x.meta["val"].shape, x.meta["val"].dtype) for value in values):
        return "its factors differ in shape or dtype"
    for first, second in of_input:
        arguments |= {"x_TD": first, "factor_TD": second}
    replaced = out
    for product, gate in of_result:
        arguments["gate_TD"], replaced = gate, product
    with graph.inserting_before(call):
        new_out = graph.node_copy(out, lambda like: arguments["x_TD"])
        emit_named(graph, CONV_STATE, arguments | {"out_TD": new_out})
    graph.erase_node(call)
    replaced.replace_all_uses_with(new_out)
    return [Replacement(replaced.name, new_out)]


def _products(out: fx.Node) -> list[fx.Node]:
    """The products of a result with another value."""
    return [user for user in out.users if factors(user)]
