"""Attention of foreign code becomes the engine's op, which writes into a buffer that it is given.

Why: a trace of foreign code is made functional, so it holds attention as a function of its arguments
(compiled_engine/attention/op.py). The cache that the op writes to is an input that nothing else reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.attention.op import ATTENTION, ATTENTION_VALUE
from compiled_engine.passes.graph_inputs import source_of
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.matching import arg, aten, emit_named, fake_mode_of, named


class ForeignAttention(GraphPass):
    name = "foreign_attention"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """One for each layer's cache: a model attends wherever it has one."""
        inputs = graph.find_nodes(op="placeholder")
        return sum(1 for node in inputs if node.users and source_of(node).name.startswith("kv_caches."))

    def run(self, graph: fx.Graph) -> PassResult:
        matches = graph.find_nodes(op="call_function", target=ATTENTION_VALUE)
        for node in matches:
            with graph.inserting_before(node):
                out = _buffer_like(graph, arg(node, 0))
                emit_named(graph, ATTENTION, named(node) | {"out_THd": out})
            node.replace_all_uses_with(out)
            graph.erase_node(node)
        return PassResult(len(matches))


def _buffer_like(graph: fx.Graph, query: fx.Node) -> fx.Node:
    keywords: Any = {"pin_memory": False, "memory_format": torch.contiguous_format}
    out = graph.call_function(aten.empty_like.default, (query,), keywords)
    like = query.meta["val"]
    with fake_mode_of(like):
        out.meta["val"] = torch.empty_like(like, memory_format=torch.contiguous_format)
    return out
