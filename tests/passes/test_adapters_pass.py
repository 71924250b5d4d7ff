"""The pass that gives linears the requests' adapters: its contract on many families, and breaks that are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from pass_cases import (
    BIASED,
    CPU,
    DYNAMIC,
    GEMMA2,
    GEMMA3,
    PHI3,
    QWEN2,
    QWEN3,
    SMALL,
    Family,
)
from test_tensor_parallel_pass import config_of
from torch import fx

from compiled_engine.config import AdapterConfig, EngineConfig
from compiled_engine.graphs.compiler.build import apply_passes, fusion_passes, trace_rank
from compiled_engine.graphs.compiler.signature import (
    ADAPTED_LOGITS,
    adapted_signature,
    callables_of,
    forward_signature,
    logits_signature,
)
from compiled_engine.graphs.compiler.trace import TracedGraph, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_inputs import add_parameter, parameter_of
from compiled_engine.passes.framework.manager import run_passes
from compiled_engine.passes.framework.matching import change, named
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.adapter_add import adapter_add
from compiled_engine.passes.linear.adapters import ADAPTER_SLOTS, Adapters, site_of
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.registry import registered_passes

ADAPTERS = AdapterConfig(max_loras=3, max_lora_rank=4, max_cpu_loras=3)


@cache
def traced(family: Family, num_ranks: int = 1) -> tuple[EngineConfig, TracedGraph]:
    config = config_of(family, num_ranks, num_layers=2)
    config = replace(config, adapters=ADAPTERS, compile=replace(config.compile, strict=True, verify=False))
    signature = replace(adapted_signature(config, ADAPTERS), ranges=(SMALL, DYNAMIC))
    return config, trace_rank(config, without_storage(build_model(local_model(config)), CPU), signature)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(
    "family",
    [QWEN3, PHI3, *(pytest.param(family, marks=pytest.mark.product(one_in=8)) for family in (QWEN2, BIASED, GEMMA3))],
    ids=str,
)
def test_every_linear_is_adapted(family: Family, small: bool) -> None:
    """Those of two layers, and the output projection of a small range; all other passes keep their contracts, since
    apply_passes is strict here."""
    config, graph = traced(family)
    verified = replace(config, compile=replace(config.compile, verify=family is QWEN3 and not small))
    _, found = apply_passes(verified, graph, SMALL if small else DYNAMIC)
    reports = {report.name: report for report in found}
    report = reports["adapters"]
    assert report.matches == report.contract == 2 * 4 + small
    assert report.verified >= (report.matches if verified.compile.verify else 0)
    assert not reports["gated_linear"].applied


@pytest.mark.parametrize("family", [QWEN3, GEMMA2], ids=str)
def test_logits_of_rows_are_adapted(family: Family) -> None:
    """No other pass runs, as for logits without adapters, which stay what they were."""
    config, _ = traced(family)
    verified = replace(config, compile=replace(config.compile, verify=True))
    signature = callables_of(config)[ADAPTED_LOGITS]
    graph = trace_rank(config, without_storage(build_model(local_model(config)), CPU), signature)
    module, reports = apply_passes(verified, graph, signature.ranges[-1])
    applied = {report.name: (report.matches, report.contract) for report in reports if report.applied}
    assert applied.pop("adapters") == (1, 1)
    assert not applied.keys() & {each.name for each in registered_passes()}
    (call,) = calls(module.graph)
    assert parameter_of(named(call)["a_SRK"]).name == "lm_head.weight.lora_a"
    plain = replace(config, adapters=None)
    assert logits_signature(config) == logits_signature(plain)
    assert not fusion_passes(config, logits_signature(config))[0]


@pytest.mark.parametrize("family", [QWEN3, PHI3], ids=str)
def test_a_ranks_share_is_adapted_before_the_sum(family: Family) -> None:
    config, graph = traced(family, 2)
    module = graph.for_range(DYNAMIC)
    passes = [each for each in fusion_passes(config, graph.signature)[0] if each.name == "adapters"]
    run_passes(module.graph, passes, ["adapters"], DYNAMIC, CPU)
    described = {
        parameter_of(node).name: parameter_of(node)
        for node in module.graph.find_nodes(op="placeholder")
        if node.meta["source"].kind == "parameter"
    }
    (site,) = (
        site_of(each, described)
        for name, each in described.items()
        if name.endswith("layers.0.self_attn.o_proj.weight.lora_a")
    )
    assert site is not None
    (weight,) = site
    assert weight.shard is not None
    assert weight.shard.dim == 1
    a, b = (described[f"{weight.name}.{name}"].shape for name in ("lora_a", "lora_b"))
    assert a == (3, 4, weight.shape[1])
    assert b == (3, weight.shape[0], 4)


def test_the_forward_without_adapters_is_what_it_was() -> None:
    config, _ = traced(QWEN3)
    plain = replace(config, adapters=None)
    assert forward_signature(config) == forward_signature(plain)
    signature = forward_signature(config)
    names = [[each.name for each in fusion_passes(one, signature)[0]] for one in (config, plain)]
    assert names[0] == names[1]
    order = [each.name for each in fusion_passes(config, adapted_signature(config, ADAPTERS))[0]]
    assert order[order.index(MergeLinears.name) + 1] == Adapters.name
    assert ADAPTER_SLOTS not in forward_signature(config).asked


def _another_input(graph: fx.Graph, node: fx.Node) -> None:
    gate_up = calls(graph)[-2]  # of the last layer; node: q, k and v of the first
    change(gate_up, x_TK=named(node)["x_TK"])


def _other_slots(graph: fx.Graph, node: fx.Node) -> None:
    own = parameter_of(named(node)["a_SRK"])
    change(node, a_SRK=add_parameter(graph, replace(own, name="layers.9.other.weight.lora_a")))


def _swapped_sizes(graph: fx.Graph, node: fx.Node) -> None:
    change(node, sizes=list(reversed(named(node)["sizes"])))


def calls(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=adapter_add))


@pytest.mark.parametrize("breaks", [_another_input, _other_slots, _swapped_sizes])
def test_breaks_are_found(breaks: Callable[[fx.Graph, fx.Node], None]) -> None:
    class Broken(Adapters):
        def run(self, graph: fx.Graph):  # type: ignore[no-untyped-def]
            result = super().run(graph)
            breaks(graph, calls(graph)[0])
            return result

    module = traced(QWEN3)[1].for_range(DYNAMIC)
    passes = (MergeLinears(), Broken(ADAPTERS))
    names = [each.name for each in passes]
    with pytest.raises(VerificationError, match=r"pass adapters: .*adapter_add"):
        run_passes(module.graph, passes, names, DYNAMIC, CPU, verify=True)
