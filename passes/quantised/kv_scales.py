"""Gives attention over an FP8 cache the scales of its keys and values, as a parameter.

Model files contain nothing about these scales. The pass runs before the fusing passes, whose ops take them too. The
parameter is filled from the checkpoint, or with 1 if the checkpoint has no scales: see models/checkpoint/kv_scales.py.
A layer that reads the keys and values of an earlier layer has a parameter of its own with the earlier layer's scales.
Latent attention needs none: an FP8 cache has a scale beside each latent.
"""

from __future__ import annotations

from torch import fx

from compiled_engine.attention.op import LATENT_ATTENTION
from compiled_engine.passes.framework.graph_inputs import add_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import attention_calls, change, named
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter


class KVScales(GraphPass):
    name = "kv_scales"
    required = True  # keys and values are wrong without the checkpoint's scales

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return len(_scaled_calls(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        notes = []
        for attention in _scaled_calls(graph):
            cache = named(attention)["kv_cache_N2PKd"]
            name = source_of(cache).name
            own = f"attention.{name.rpartition('.')[2]}.{KV_SCALES}"
            parameter = Parameter(own, (2, cache.meta["val"].shape[3]), "float32", KV_SCALES)
            with graph.inserting_before(attention):
                change(attention, kv_scales_2K=add_parameter(graph, parameter))
            notes.append(f"{name}: scales of keys and values are those of the checkpoint, 1 if it has none")
        return PassResult(len(notes), (), (), tuple(notes))


def _scaled_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of attention that take scales of keys and values."""
    return [call for call in attention_calls(graph) if call.target is not LATENT_ATTENTION]
