"""Attention over an FP8 cache gets the scales of its keys and values as a parameter.

A model's file knows nothing of them. The pass comes before the fusing ones, which hand the argument on. The parameter
is filled with what the checkpoint states, and with 1 if it states nothing: see models/checkpoint/kv_scales.py.
"""

from __future__ import annotations

from torch import fx

from compiled_engine.attention.op import ATTENTION
from compiled_engine.passes.framework.graph_inputs import add_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import change, named
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter


class KVScales(GraphPass):
    name = "kv_scales"
    required = True  # without the scales of a checkpoint keys and values are wrong

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(graph.find_nodes(op="call_function", target=ATTENTION))

    def run(self, graph: fx.Graph) -> PassResult:
        notes = []
        for attention in graph.find_nodes(op="call_function", target=ATTENTION):
            cache = named(attention)["kv_cache_N2PKd"]
            name = source_of(cache).name
            own = f"attention.{name.rpartition('.')[2]}.{KV_SCALES}"
            parameter = Parameter(own, (2, cache.meta["val"].shape[3]), "float32", KV_SCALES)
            with graph.inserting_before(attention):
                change(attention, kv_scales_2K=add_parameter(graph, parameter))
            notes.append(f"{name}: scales of keys and values are those of the checkpoint, 1 if it has none")
        return PassResult(len(notes), (), (), tuple(notes))
