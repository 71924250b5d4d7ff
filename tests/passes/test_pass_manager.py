"""The pass manager: contracts on every family, what is not run and why, strict mode, profiles, diffs, a user's pass."""

from __future__ import annotations

import importlib
import linecache
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pass_cases import (
    CPU,
    FAMILIES,
    GEMMA3,
    PHI3,
    QWEN3,
    QWEN3_MOE,
    RANGES,
    SMALL,
    YARN,
    Family,
    run_all,
    traced,
)
from tiny_models import tiny_config
from torch import fx

from compiled_engine.attention.op import ATTENTION
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.passes.framework.graph_inputs import parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.manager import pass_uuid
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter
from compiled_engine.passes.framework.verifier import copy_of, verify_rewrites
from compiled_engine.passes.quantised.kv_scales import KVScales
from compiled_engine.passes.registry import DEFAULT_PASSES, register_pass, registered_passes, unregister_pass

NAMES = tuple(graph_pass.name for graph_pass in DEFAULT_PASSES)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=30)
@pytest.mark.parametrize("num_layers", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_pass_matches_exactly_its_contract(family: Family, dtype: torch.dtype, num_layers: int) -> None:
    ropes = 2 if family is GEMMA3 else 1
    mlps, experts = (0, num_layers) if family is QWEN3_MOE else (num_layers, 0)
    for compile_range in RANGES:
        verify = num_layers == 2
        reports = run_all(family, dtype, compile_range, num_layers=num_layers, verify=verify)
        assert all((report.verified > 0) == (verify and report.matches > 0) for report in reports)
        assert {report.name: report.matches for report in reports} == {
            "no_op_elimination": 0 if family.rope is YARN else 2 * ropes,
            "merge_linears": 0 if family is PHI3 else num_layers + mlps,
            "all_reduce_residual_rms_norm": 0,
            "sequence_parallel": 0,
            "experts": experts,
            "top_k": 0,
            "residual_rms_norm": 2 * num_layers,
            "rms_norm": 1,
            "layer_norm": 0,
            "rope_angles": ropes,
            "rope_kv_write": num_layers,
            "rope_attend": num_layers,
            "gated_convolution": 0,
            "silu_mul": mlps,
            "small_batch_linear": 2 * num_layers + 2 * mlps + experts + 1 if compile_range.small else 0,
            "gated_linear": 0 if compile_range.small else mlps,
            "quantise_activations": 0,
            "reorder_codes": 0,
        }
        assert all(report.matches == report.contract for report in reports)
        assert [report.near_misses for report in reports] == [()] * len(reports)
        not_applied = [report.name for report in reports if not report.applied]
        for_several = ["all_reduce_residual_rms_norm", "sequence_parallel"]
        not_here = ["gated_linear"] if compile_range.small else ["small_batch_linear"]
        assert not_applied == ["top_k", *for_several, *not_here, "quantise_activations", "reorder_codes"]


class Never(GraphPass):
    """A pass that must match once and never does."""

    name = "never"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 1

    def run(self, graph: fx.Graph) -> PassResult:
        return PassResult(0, ("exp: there is none",))


def test_what_is_not_a_pass_is_refused() -> None:
    for other in (object(), type("Nameless", (GraphPass,), {})()):
        with pytest.raises(TypeError, match="allowed: a GraphPass with a name"):
            register_pass(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"after is 'nothing'; allowed: no_op_elimination"):
        register_pass(Never(), after="nothing")
    with pytest.raises(ValueError, match="name is 'silu_mul'; allowed: nothing is registered"):
        unregister_pass("silu_mul")
    assert registered_passes() == DEFAULT_PASSES


def test_an_edited_pass_has_another_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    uuids = []
    for body in ("return PassResult(0)", "return PassResult(1)", "return PassResult(0)"):
        source = f"class Edited:\n    name, uuid = 'edited', None\n    def run(self): {body}\n"
        (tmp_path / "edited_pass.py").write_text(source)
        monkeypatch.delitem(sys.modules, "edited_pass", raising=False)
        linecache.checkcache()
        uuids.append(pass_uuid(importlib.import_module("edited_pass").Edited()))
    assert uuids[0] != uuids[1]
    assert uuids[0] == uuids[2]


def test_every_pass_has_a_uuid_of_its_own() -> None:
    uuids = {pass_uuid(graph_pass) for graph_pass in (*DEFAULT_PASSES, Never())}
    assert len(uuids) == len(DEFAULT_PASSES) + 1
    assert all(len(uuid) == 16 for uuid in uuids)
    own = type("Own", (), {"name": "own", "uuid": "v1", "__module__": "nowhere"})()
    assert pass_uuid(own) == "v1"


def test_attention_over_an_fp8_cache_gets_the_scales_of_its_layer() -> None:
    graph = traced(QWEN3, torch.float32)[1].for_range(SMALL).graph
    graph_pass = KVScales()
    assert graph_pass.contract(graph, SMALL) == 2
    result = graph_pass.run(graph)
    assert result.matches == len(result.notes) == 2
    for layer, call in enumerate(graph.find_nodes(op="call_function", target=ATTENTION)):
        arguments = named(call)
        cache = source_of(arguments["kv_cache_N2PKd"]).name
        assert cache == f"kv_caches.{layer}"
        heads = arguments["kv_cache_N2PKd"].meta["val"].shape[3]
        name = f"attention.{layer}.kv_scales"
        assert parameter_of(arguments["kv_scales_2K"]) == Parameter(name, (2, heads), "float32", KV_SCALES)
        assert result.notes[layer].startswith(f"{cache}: scales of keys and values")


def test_scales_of_an_fp8_cache_are_verified_as_those_of_a_checkpoint_without_any() -> None:
    config = tiny_config("Qwen3ForCausalLM", 1)
    config = replace(config, cache=replace(config.cache, kv_dtype="fp8_e4m3"))
    graph = trace(without_storage(build_model(config.model), CPU), forward_signature(config)).for_range(SMALL).graph
    before = copy_of(graph)
    result = KVScales().run(graph)
    assert verify_rewrites(KVScales.name, before, graph, result, SMALL, CPU) == 1
