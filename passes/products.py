"""Products with parameters, as a trace has them."""

from __future__ import annotations

from torch import fx

from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.matching import arg, aten, is_call


def multiplied_parameter(node: fx.Node) -> fx.Node | None:
    """The parameter, transposed in the graph, that a product multiplies with."""
    if not is_call(node, aten.mm.default, aten.addmm.default, aten.bmm.default):
        return None
    matrix = arg(node, -1)
    turned = is_call(matrix, aten.t.default, aten.transpose.int, aten.permute.default)
    return arg(matrix, 0) if turned and is_parameter(arg(matrix, 0)) else None
