"""Decomposes fused ops into ops of torch, for devices without the engine's kernels.

Inductor's C++ backend, which cannot compile Triton kernels, then fuses these ops with their neighbours.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.attention.inputs import Rotation
from compiled_engine.passes.framework.matching import fake_mode_of, is_call, named
from compiled_engine.passes.framework.op_library import references
from compiled_engine.passes.rope import rope_attend, rope_kv_write


def expand_references(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an ATen graph in which fused ops are decomposed, by their reference functions, into other ops.

    Fused ops without a reference function are not decomposed. The placeholders keep their sources (`meta["source"]`).
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in placeholders]
    table: dict[Any, Any] = dict(references())
    with fake_mode_of(fakes):
        expanded = make_fx(_with_writes_in_attention(module.graph), decomposition_table=table)(*fakes)
    for new, old in zip(expanded.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        new.meta["source"] = old.meta["source"]
    expanded.graph.eliminate_dead_code()
    expanded.recompile()
    return expanded


def _with_writes_in_attention(original: fx.Graph) -> fx.GraphModule:
    """Return a copy of the graph in which unfused calls replace rope_kv_write and rope_attend.

    rope_kv_write.reference norms and rotates, and the attention op writes k and v to the KV cache. A decomposition
    table cannot do this, since rope_kv_write and the `attend` after it must be replaced together.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(original, {}))
    for fused in graph.find_nodes(op="call_function", target=rope_attend.FUSED):
        arguments = named(fused)
        with graph.inserting_before(fused):
            rotated_q, rotated_k = _rotated(graph, arguments)
            _attention(graph, arguments | {"q_THd": rotated_q, "k_TKd": rotated_k})
        graph.erase_node(fused)
    for fused in graph.find_nodes(op="call_function", target=rope_kv_write.FUSED):
        attend = next(user for user in fused.users if is_call(user, rope_kv_write.ATTEND))
        with graph.inserting_before(fused):
            rotated_q, rotated_k = _rotated(graph, named(fused))
        with graph.inserting_before(attend):
            _attention(graph, named(fused) | named(attend) | {"q_THd": rotated_q, "k_TKd": rotated_k})
        graph.erase_node(attend)
        fused.replace_all_uses_with(rotated_q)
        graph.erase_node(fused)
    return fx.GraphModule({}, graph)


def _rotated(graph: fx.Graph, arguments: dict[str, Any]) -> list[fx.Node]:
    """Emit a call of rope_kv_write.reference, which norms and rotates q and k, and return [rotated q, rotated k].

    arguments: the arguments of the fused op, by name.
    """
    rotation = [arguments[name] for name in Rotation._fields]
    both = graph.call_function(rope_kv_write.reference, (arguments["q_THd"], arguments["k_TKd"], *rotation))
    return [graph.call_function(operator.getitem, (both, index)) for index in range(2)]


def _attention(graph: fx.Graph, arguments: dict[str, Any]) -> None:
    declared: Any = rope_kv_write.ATTENTION
    graph.call_function(declared, tuple(arguments[each.name] for each in declared._schema.arguments))
