"""Removes ops whose result equals an input, such as multiplications by one, and casts, views and copies without effect.

Why: model code is general, so it leaves no-ops in the graph, such as a RoPE scaling factor of 1, a cast to the dtype
that the value has already, or a mask of the experts outside of the chosen groups where there is one group. They hide
patterns from later passes. Inductor would fuse most of them, but not the choice of groups.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import always_equal, arg, aten, is_call
from compiled_engine.passes.layout.constant_fills import fill_of

_RESHAPES = (aten.slice.Tensor, aten.view.default, aten.reshape.default, aten.expand.default, aten._unsafe_view.default)
_COPIES = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_MASKED = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


class NoOpElimination(GraphPass):
    name = "no_op_elimination"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of multiplications by one. Other no-ops are not counted: they depend on the trace."""
        products = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        return sum(1 for product in products if product.args[1:] == (1.0,))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements = []
        for node in graph.nodes:
            same = _input_that_it_equals(node)
            if same is not None:
                replacements.append(Replacement(node.name, same))
                node.replace_all_uses_with(same)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        return PassResult(len(replacements), (), tuple(replacements))


def _input_that_it_equals(node: fx.Node) -> fx.Node | None:
    """Return the input that equals the node's result in values, shape, strides and dtype; None if there is none."""
    if is_call(node, aten.cat.default):
        full = [part for part in arg(node, 0) if 0 not in part.meta["val"].shape]
        return full[0] if len(full) == 1 and _alike(full[0].meta["val"], node.meta["val"]) else None
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    scaled = is_call(node, aten.mul.Tensor, aten.div.Tensor)
    one = scaled and isinstance(node.args[1], int | float) and node.args[1] == 1
    unmasked = is_call(node, *_MASKED) and fill_of(node.args[1]) is False
    if not (one or unmasked or is_call(node, *_RESHAPES, *_COPIES, aten._to_copy.default)):
        return None
    return source if _alike(source.meta["val"], node.meta["val"]) else None


def _alike(before: object, after: object) -> bool:
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    sizes = [(before.shape, after.shape), (before.stride(), after.stride())]
    return (
        before.dtype == after.dtype
        and before.device == after.device
        and all(len(a) == len(b) and all(map(always_equal, a, b)) for a, b in sizes)
    )
