"""Replaces complex numbers by pairs of real numbers.

Why: some code of transformers (DeepSeek-V2) rotates heads by a product of complex numbers, which neither the fused
kernels nor Inductor's C++ compute. In the graph a complex tensor [...] becomes a real tensor [..., 2]: the real and the
imaginary part of each element, in the layout of `view_as_real`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, aten, emit, is_call

_COPIES = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


class ComplexNumbers(GraphPass):
    name = "complex_numbers"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of nodes whose value is complex."""
        return sum(map(has_complex_value, graph.nodes))

    def run(self, graph: fx.Graph) -> PassResult:
        pairs: dict[fx.Node, fx.Node] = {}
        misses, replacements = [], []
        for node in list(graph.nodes):
            with graph.inserting_before(node):
                if is_call(node, aten.view_as_real.default) and arg(node, 0) in pairs:
                    pair = pairs[arg(node, 0)]
                    node.replace_all_uses_with(pair)
                    replacements.append(Replacement(node.name, pair))
                elif has_complex_value(node):
                    found = _pair_of(graph, node, pairs)
                    if found is None:
                        misses.append(f"{node.name}: {node.target} of complex numbers is not known")
                    else:
                        pairs[node] = found
        graph.eliminate_dead_code()
        return PassResult(len(pairs), tuple(misses), tuple(replacements))


def has_complex_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _pair_of(graph: fx.Graph, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return a node with the real and imaginary parts, [..., 2], of a complex value; insert ops that compute it.

    pairs: nodes with complex values -> nodes with their parts. Returns None if the op or an operand is not supported.
    """
    if is_call(node, aten.view_as_complex.default):
        return arg(node, 0)  # type: ignore[no-any-return]
    first = pairs.get(arg(node, 0)) if node.args else None
    if first is None:
        return None
    if is_call(node, *_COPIES):
        return first
    if is_call(node, aten.unsqueeze.default):
        dim = arg(node, 1)
        return emit(graph, aten.unsqueeze.default, first, dim if dim >= 0 else dim - 1)
    if is_call(node, aten.mul.Tensor):
        other: Any = arg(node, 1)
        if isinstance(other, int | float):
            return emit(graph, aten.mul.Tensor, first, other)
        return None if other not in pairs else _product(graph, first, pairs[other])
    return None


def _product(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    (a, b), (c, d) = ([emit(graph, aten.select.int, pair, -1, part) for part in (0, 1)] for pair in (left, right))
    ac, bd, ad, bc = (emit(graph, aten.mul.Tensor, *both) for both in ((a, c), (b, d), (a, d), (b, c)))
    parts = [emit(graph, aten.sub.Tensor, ac, bd), emit(graph, aten.add.Tensor, ad, bc)]
    return emit(graph, aten.stack.default, parts, -1)
