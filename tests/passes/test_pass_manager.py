"""The pass manager: contracts on every family, what is not run and why, strict mode, profiles, diffs, a user's pass."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pass_cases import (
    CPU,
    DYNAMIC,
    FAMILIES,
    GEMMA3,
    LLAMA,
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
from torch import fx

from compiled_engine.attention.op import ATTENTION
from compiled_engine.passes.framework.graph_inputs import parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.graph_text import graph_diff, graph_text
from compiled_engine.passes.framework.manager import ContractError, PassReport, pass_uuid, run_passes
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter
from compiled_engine.passes.framework.profile import DeviceProfile
from compiled_engine.passes.quantised.kv_scales import KVScales
from compiled_engine.passes.registry import DEFAULT_PASSES, register_pass, registered_passes, unregister_pass

NAMES = tuple(graph_pass.name for graph_pass in DEFAULT_PASSES)


def reports_of(
    enabled: tuple[str, ...] = NAMES, compile_range: CompileRange = SMALL, profile: DeviceProfile | None = None
) -> dict[str, PassReport]:
    _, graphs = traced(QWEN3, torch.float32)
    graph = graphs.for_range(compile_range).graph
    reports = run_passes(graph, DEFAULT_PASSES, enabled, compile_range, CPU, profile=profile)
    return {report.name: report for report in reports}


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
        }
        assert all(report.matches == report.contract for report in reports)
        assert [report.near_misses for report in reports] == [()] * len(reports)
        not_applied = [report.name for report in reports if not report.applied]
        for_several = ["all_reduce_residual_rms_norm", "sequence_parallel"]
        not_here = ["gated_linear"] if compile_range.small else ["small_batch_linear"]
        assert not_applied == [*for_several, *not_here, "quantise_activations"]


@pytest.mark.parametrize("name", NAMES)
def test_a_disabled_pass_does_not_run(name: str) -> None:
    reports = reports_of(tuple(other for other in NAMES if other != name))
    assert list(reports) == list(NAMES)
    assert reports[name] == PassReport(name, enabled=False, applied=False, reason="disabled")
    elsewhere = ("all_reduce_residual_rms_norm", "sequence_parallel", "gated_linear", "quantise_activations")
    others = [report for report in reports.values() if report.name not in (name, *elsewhere)]
    assert all(report.applied for report in others) or name in ("merge_linears", "rope_kv_write")


def test_a_pass_that_needs_a_disabled_one_says_so() -> None:
    report = reports_of(tuple(name for name in NAMES if name != "merge_linears"))["silu_mul"]
    assert (report.enabled, report.applied) == (True, False)
    assert report.reason == "needs merge_linears, which is disabled"


def test_a_pass_that_does_not_apply_says_so() -> None:
    report = reports_of(compile_range=DYNAMIC)["small_batch_linear"]
    assert (report.enabled, report.applied, report.matches) == (True, False, 0)
    assert report.reason == "1-256 tokens is not a small-batch range"


def test_a_report_says_what_changed() -> None:
    report = reports_of()["silu_mul"]
    assert report.nodes_before > report.nodes_after > 0
    assert report.seconds > 0
    went = [line for line in report.diff.splitlines() if line.startswith("- ")]
    came = [line for line in report.diff.splitlines() if line.startswith("+ ")]
    assert sum("aten.silu.default" in line for line in went) == 2
    assert sum("compiled_engine.silu_mul.default" in line for line in came) == 2


@pytest.mark.parametrize("change", [{}, {"near_misses": ("a: b",), "matches": 3}])
def test_a_report_comes_back_from_json(change: dict[str, object]) -> None:
    report = replace(reports_of()["rms_norm"], **change)
    as_json = vars(report) | {"near_misses": list(report.near_misses)}
    assert PassReport.from_json(as_json) == report


class Never(GraphPass):
    """A pass that must match once and never does."""

    name = "never"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 1

    def run(self, graph: fx.Graph) -> PassResult:
        return PassResult(0, ("exp: there is none",))


def test_strict_mode_names_the_pass_below_its_contract() -> None:
    with pytest.raises(
        ContractError,
        match=r"pass never matched 0 times over 1-8 tokens, its contract is 1; candidates that did not match: ",
    ):
        run_all(QWEN3, torch.float32, SMALL, (Never(),))


def test_otherwise_a_pass_below_its_contract_is_reported() -> None:
    _, graphs = traced(QWEN3, torch.float32)
    graph = graphs.for_range(SMALL).graph
    (report,) = run_passes(graph, (Never(),), ("never",), SMALL, CPU)
    assert (report.matches, report.contract, report.near_misses) == (0, 1, ("exp: there is none",))
    assert report.diff == ""


PROFILE = DeviceProfile("a test", {"silu_mul": {1: -9.0, 8: -4.0, 64: 7.0}, "rms_norm": {1: 1.0, 8: -1.5}}, 2.0, {})


@pytest.mark.parametrize(
    ("name", "compile_range", "reason"),
    [
        ("silu_mul", SMALL, "it is slower on a test: 9.0 microseconds in a step of 1 tokens"),
        ("silu_mul", CompileRange(1, 64), None),  # it gains somewhere in the range
        ("silu_mul", CompileRange(2, 32), "it is slower on a test: 4.0 microseconds in a step of 8 tokens"),
        ("silu_mul", CompileRange(9, 63), None),  # nothing was measured there
        ("rms_norm", SMALL, None),  # less than the noise
        ("merge_linears", SMALL, None),  # never measured
    ],
)
def test_a_profile_says_why_a_pass_is_left_out(name: str, compile_range: CompileRange, reason: str | None) -> None:
    assert PROFILE.why_not(name, compile_range) == reason


def test_a_pass_that_does_not_pay_is_not_applied() -> None:
    report = reports_of(profile=PROFILE)["silu_mul"]
    assert (report.enabled, report.applied) == (True, False)
    assert report.reason == PROFILE.why_not("silu_mul", SMALL)


def test_a_diff_shows_what_went_and_came_with_two_lines_around() -> None:
    before = [f"line {i}" for i in range(12)]
    after = [*before[:5], "new", *before[6:]]
    assert graph_diff(before, after).splitlines() == [
        "...",
        "  line 3",
        "  line 4",
        "- line 5",
        "+ new",
        "  line 6",
        "  line 7",
        "...",
    ]
    assert graph_diff(before, before) == ""
    assert graph_diff(["a", "b"], ["a"]).splitlines() == ["  a", "- b"]
    assert graph_diff(["a", "b"], ["c", "d"]).splitlines() == ["- a", "- b", "+ c", "+ d"]
    assert graph_diff(["a", "k", "b"], ["c", "k", "d"]).splitlines() == ["- a", "+ c", "  k", "- b", "+ d"]


def test_a_graph_as_text_names_inputs_and_types() -> None:
    _, graphs = traced(LLAMA, torch.bfloat16)
    text = "\n".join(graph_text(graphs.for_range(DYNAMIC).graph))
    assert "bfloat16[64, 96] = input model.layers.0.self_attn.o_proj.weight" in text
    assert "= aten.mm.default(" in text
    assert text.splitlines()[-1].startswith("return [") or text.splitlines()[-1].startswith("return (")


@pytest.fixture
def registered() -> Iterator[Never]:
    graph_pass = Never()
    register_pass(graph_pass, after="silu_mul")
    yield graph_pass
    unregister_pass("never")


def test_a_registered_pass_stands_where_it_was_put(registered: Never) -> None:
    names = [graph_pass.name for graph_pass in registered_passes()]
    assert names == [*NAMES[: NAMES.index("silu_mul") + 1], "never", *NAMES[NAMES.index("silu_mul") + 1 :]]
    with pytest.raises(ValueError, match="name is 'never', which is taken"):
        register_pass(registered)


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
