"""The report of an entry that is written out here, figure by figure; as text files and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig, json_value
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, read_compiled_ranges, write_compiled_range
from compiled_engine.graphs.compiler.guards import GuardRecord
from compiled_engine.graphs.compiler.plan import Carried, Plan, PlannedStep
from compiled_engine.graphs.compiler.record import ModuleRecord, ParameterRecord, PieceRecord, Record, SymbolRecord
from compiled_engine.graphs.inspection import kernels
from compiled_engine.graphs.inspection.html import _waterfall as waterfall
from compiled_engine.graphs.inspection.html import render_html
from compiled_engine.graphs.inspection.report import CompiledEntry, Report, make_report
from compiled_engine.graphs.inspection.sections import facts, sections
from compiled_engine.graphs.inspection.text_folder import write_text_folder
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.process.timeline import Span

FIRST, INNER, LAST, HEAD = (letter * 20 for letter in "abcd")
FACTORS = {"config": {"model.num_layers": 3}, "device": {"type": "cpu"}, "versions": {"torch": "2.13.0"}}
CONFIG: dict[str, Any] = {
    "device": "cuda",
    "graph": json_value(GraphConfig(GraphMode.FULL, (1, 2), (4,))),
    "scheduler": json_value(SchedulerConfig(2, 64, 128, "fcfs")),
    "model": {"architecture": "Qwen3ForCausalLM", "num_layers": 3, "hidden_size": 64, "num_heads": 4}
    | {"num_kv_heads": 2, "head_dim": 16, "vocab_size": 101, "dtype": "float32", "sliding_windows": [None] * 3}
    | {"eos": [1, 2], "none": []},
    "reasons": {"device": "found one"},
}


def call(piece: str | None, op: str | None, values: tuple[int, ...], results: tuple[int, ...]) -> PlannedStep:
    return PlannedStep(piece, op, tuple({"value": value} for value in values), results)


def weight(name: str, *members: Parameter) -> Parameter:
    return Parameter(name, (8, 8), "float32", members=members)


QUERY, KEY, DOWN = ([weight(f"layers.{n}.{name}.weight") for n in range(3)] for name in ("q_proj", "k_proj", "down"))
PACKED = [weight(f"layers.{n}.q_proj|k_proj", QUERY[n], KEY[n]) for n in range(3)]
INPUTS = (Source("argument", "input_ids_T"), Source("size", "input_ids_T"), *PACKED, *DOWN)
ATTENTION = "compiled_engine::attention"


def plan_of(first: str = FIRST, inner: str = INNER, last: str = LAST) -> Plan:
    """Layers of which each piece holds the end of one and the beginning of the next."""
    steps = (
        *(call(first, None, (0, 1, 2), (8,)), call(None, ATTENTION, (8,), ())),
        *(call(inner, None, (8, 5, 3), (9,)), call(None, ATTENTION, (9,), ())),
        *(call(inner, None, (9, 6, 4), (10,)), call(None, ATTENTION, (10,), ())),
        call(last, None, (10, 7), (11,)),
    )
    return Plan(("input_ids_T",), INPUTS, steps, (11,), (Carried(8, "float32", (64,)),))


PASSES = (
    PassReport("merge_linears", True, True, "", 6, 6, ("near",), 0.5, 40, 30, "- a\n+ b\n", 2, ("a note",)),
    PassReport("silu_mul", True, False, "too few tokens"),
    PassReport("rms_norm", True, True, "", 3, 4, (), 0.25, 30, 20, "- c\n+ d\n"),
)
SMALL = CompiledRange("forward", CompileRange(1, 8, small=True), plan_of(), ("logits_TV",), PASSES)
WHOLE = CompiledRange("forward", CompileRange(1, 64), plan_of(first=HEAD), ("hidden_TD", "input of layer 1"), ())
LOGITS = CompiledRange(
    "logits",
    CompileRange(1, 64),
    Plan(("hidden_RD",), (Source("argument", "hidden_RD"),), (call(HEAD, None, (0,), (1,)),), (1,)),
    ("logits_RV",),
    (),
)
RANGES = (SMALL, WHOLE, LOGITS)
GRAPH = {"symbols": {"n0": [1, 64]}, "nodes": [["input", {"size": "n0"}], ["output", [{"node": 0}]]]}
PYTHON = "def piece(v0, v1):\n    v2 = op__aten__mm__default(v0, v1)\n{}    return (v2,)\n"
ACTIVATION = "    v2 = op__compiled_engine__silu_mul__default(v2)\n"
SOURCES = {FIRST: PYTHON.format(""), INNER: PYTHON.format(ACTIVATION * 2), LAST: PYTHON.format(ACTIVATION)}


def module(path: str, *children: ModuleRecord, count: int = 1, parameters: tuple[str, ...] = ()) -> ModuleRecord:
    records = tuple(ParameterRecord(name, (8, 8), "float32") for name in parameters)
    return ModuleRecord(path, path.rpartition(".")[2] or "Model", count, records, children)


LAYER = [module(f"layers.0.{name}", parameters=("weight",)) for name in ("q_proj", "k_proj", "down")]
RECORD = Record(
    (Span("build", 0.0, 4.0), Span("trace", 0.5, 1.0, "build"), Span(f"piece {INNER}", 2.0, 1.5, "build")),
    module("", module("layers", module("layers.0", *LAYER, count=3))),
    (SymbolRecord("s0", "tokens", 1, 64, ("input_ids_T.shape[0]", "positions_T.shape[0]")),),
    (
        GuardRecord("inputs", "TENSOR_MATCH", 3, (("input_ids_T", 3),), "made by the engine"),
        GuardRecord("inputs", "TYPE_MATCH", 2, (("positions_T", 2),), "made by the engine"),
        GuardRecord("", "ID_MATCH", 1, (("x", 1),), ""),
    ),
    (PieceRecord(INNER, 1.5, 7), *(PieceRecord(key, 0.0, None) for key in (FIRST, LAST, HEAD))),
)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("entry")
    (folder / "pieces").mkdir()
    for compiled in RANGES:
        write_compiled_range(folder, compiled, [f"graph of {compiled.name}"])
    for key in (FIRST, INNER, LAST, HEAD):
        (folder / "pieces" / f"{key}.json").write_text(json.dumps(GRAPH))
    for key, source in SOURCES.items():
        (folder / "pieces" / f"{key}.py").write_text(source)
    (folder / "trace").mkdir()
    (folder / "trace" / "aten_graph.txt").write_text("the trace")
    RECORD.write(folder)
    return folder


def report_of(entry: Path, status: str = "hit", metrics: dict[str, Any] | None = None) -> Report:
    spans = [{"name": "load", "start_s": 1.0, "seconds": 0.5, "parent": None}]
    return make_report(CONFIG, CompiledEntry(entry, status, FACTORS), spans, metrics)


@pytest.fixture(scope="module")
def data(entry: Path) -> dict[str, Any]:
    found = report_of(entry).data
    assert json.loads(json.dumps(found)) is not None  # plain JSON
    return found


def test_ranges_come_back_from_their_files_the_forwards_first_and_the_small_before_the_whole(entry: Path) -> None:
    assert read_compiled_ranges(entry) == RANGES
    assert [compiled.name for compiled in RANGES] == ["1-8", "1-64", "logits/1-64"]
    assert sorted(path.name for path in (entry / "1-8" / "passes").iterdir()) == [
        *("00_merge_linears.diff", "02_rms_norm.diff"),
    ]


def test_each_piece_is_shown_once_with_all_its_uses(data: dict[str, Any]) -> None:
    found = {piece["name"]: piece for piece in data["pieces"]}
    assert {name: (piece["key"], piece["uses"]) for name, piece in found.items()} == {
        "A": (FIRST, {"1-8": 1}),
        "B": (INNER, {"1-8": 2, "1-64": 2}),
        "C": (LAST, {"1-8": 1, "1-64": 1}),
        "D": (HEAD, {"1-64": 1, "logits/1-64": 1}),
    }
    assert [piece["ranges"] for piece in found.values()] == [
        *(["1-8"], ["1-8", "1-64"], ["1-8", "1-64"], ["1-64", "logits/1-64"]),
    ]
    assert [(piece["seconds"], piece["worker"]) for piece in found.values()] == [
        *((0.0, None), (1.5, 7), (0.0, None), (0.0, None)),
    ]
    assert [(piece["graph"], piece["source"]) for piece in found.values()] == [
        *(("1-8/piece_1.txt", "1-8/piece_1.py"), ("1-8/piece_2.txt", "1-8/piece_2.py")),
        *(("1-8/piece_3.txt", "1-8/piece_3.py"), ("1-64/piece_1.txt", "1-64/piece_1.py")),
    ]
    op = {"name": "compiled_engine::silu_mul", "kind": "op"}
    product = {"name": "mm", "kind": "library", "launches": 1}
    assert [piece["kernels"] for piece in found.values()] == [
        *([product], [product, op | {"launches": 2}], [product, op | {"launches": 1}], []),
    ]


def test_pieces_and_modules_lead_to_one_another(data: dict[str, Any]) -> None:
    """A piece has the end of one layer and the beginning of the next: which of the equal layers, its modules say."""
    assert {piece["name"]: piece["modules"] for piece in data["pieces"]} == {
        "A": ["layers.0.q_proj", "layers.0.k_proj"],
        "B": ["layers.{1-2}.q_proj", "layers.{1-2}.k_proj", "layers.{0-1}.down"],
        "C": ["layers.2.down"],
        "D": ["layers.0.q_proj", "layers.0.k_proj"],
    }
    (layer,) = data["modules"]["children"][0]["children"]
    query, key, down = layer["children"]
    assert query["pieces"] == key["pieces"]
    assert query["pieces"] == [
        {"range": "1-8", "key": FIRST, "instances": "0"},
        {"range": "1-64", "key": HEAD, "instances": "0"},
        {"range": "1-8", "key": INNER, "instances": "1-2"},
        {"range": "1-64", "key": INNER, "instances": "1-2"},
    ]
    assert [use["instances"] for use in down["pieces"]] == ["0-1", "0-1", "2", "2"]
    of_layer = {(use["range"], use["key"]): use["instances"] for use in layer["pieces"]}
    assert of_layer == {
        **{("1-8", FIRST): "0", ("1-64", HEAD): "0", ("1-8", INNER): "0-2", ("1-64", INNER): "0-2"},
        **{("1-8", LAST): "2", ("1-64", LAST): "2"},
    }
    assert {use["instances"] for use in data["modules"]["pieces"]} == {""}


def test_launches_of_a_forward_are_those_of_all_its_steps(data: dict[str, Any]) -> None:
    small, whole, logits = (data["kernels_per_step"][name] for name in ("1-8", "1-64", "logits/1-64"))
    assert (small["total"], whole["total"], logits["total"]) == (1 + 3 * 2 + 2 + 3, 3 * 2 + 2 + 3, 0)
    assert small["by_kind"] == {"library": 4, "op": 5, "splitting op": 3}
    assert [(kernel["name"], kernel["kind"], kernel["launches"]) for kernel in small["kernels"]] == [
        *(("compiled_engine::silu_mul", "op", 5), ("mm", "library", 4), (ATTENTION, "splitting op", 3)),
    ]


def test_the_entry_and_its_files(entry: Path, data: dict[str, Any]) -> None:
    files = [path for path in entry.rglob("*") if path.is_file()]
    assert data["cache"] == {
        "key": factors_key(FACTORS),
        "status": "hit",
        "folder": str(entry),
        "size": sum(path.stat().st_size for path in files),
        "files": len(files),
        "factors": FACTORS,
    }
    off = report_of(entry, "off").data
    assert off["cache"]["folder"] is None
    assert "kept until the engine ends" in off["notes"]["cache"]
    assert "cache" not in data["notes"]


def test_captures_have_the_memory_that_was_measured(entry: Path, data: dict[str, Any]) -> None:
    measured = {"graph_bytes_by_key": {"decode 2": {"pool": 100, "driver": 20}, "full 4": {"pool": 7, "driver": 0}}}
    assert report_of(entry, metrics=measured).data["captures"] == [
        {"kind": "decode", "size": 1, "bytes": None},
        {"kind": "decode", "size": 2, "bytes": 120},
        {"kind": "full", "size": 4, "bytes": 7},
    ]
    assert [capture["bytes"] for capture in data["captures"]] == [None] * 3


def test_notes_say_what_is_missing(entry: Path, data: dict[str, Any]) -> None:
    assert data["notes"].keys() == {"run"}
    assert report_of(entry, metrics={}).data["notes"] == {}
    without = CONFIG | {"graph": json_value(GraphConfig(GraphMode.NONE))}
    assert make_report(without, None, [], {}).data["notes"].keys() == {"compile", "captures"}
    assert make_report(without | {"device": "cpu"}, None, [], {}).data["notes"].keys() == {"compile"}


def test_facts_and_sections(data: dict[str, Any]) -> None:
    assert facts(data) == [
        ("Passes at contract", "1 of 2"),
        ("Unique pieces", "4"),
        ("Ranges of tokens", "1-8, 1-64, logits/1-64"),
        ("Launches a step", "12, 11, 0"),
        ("Compiled in", "4.0 s"),
        ("Cache", "hit"),
    ]
    ids = ["start-up", "model", "passes", "graphs", "pieces", "kernels", "guards", "configuration", "cache"]
    on_cpu, eager = data | {"config": CONFIG | {"device": "cpu"}}, make_report(CONFIG, None, [])
    assert [section.id for section in sections(on_cpu)] == ids
    assert [section.id for section in sections(data)] == [*ids[:7], "cuda-graphs", *ids[7:]]
    assert not any(section.empty for section in sections(data))
    assert facts(eager.data) == [("Compiled", "no: eager")]
    empty = {section.id for section in sections(eager.data) if section.empty}
    assert empty == {*ids} - {"start-up", "configuration"}
    no_graphs = make_report(CONFIG | {"graph": json_value(GraphConfig(GraphMode.NONE))}, None, []).data
    assert {section.id for section in sections(no_graphs) if section.empty} == empty | {"cuda-graphs"}


def test_the_text_folder(entry: Path, tmp_path: Path) -> None:
    report = report_of(entry)
    (tmp_path / "notes.txt").write_text("mine")
    write_text_folder(report, tmp_path)
    write_text_folder(report, tmp_path)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    summaries = ("config", "cache", "times", "guards")
    assert {name: json.loads(texts[f"{name}.json"]) for name in summaries} == {
        "config": report.data["config"],
        "cache": report.data["cache"],
        "times": report.data["phases"],
        "guards": json.loads(json.dumps(report.data["guards"])),
    }
    assert texts["passes.txt"].splitlines() == [
        "         1-8 merge_linears: 6 of 6",
        "               did not match: near",
        "               a note",
        "         1-8 silu_mul: too few tokens",
        "         1-8 rms_norm: 3 of 4",
    ]
    assert texts["pieces.txt"].splitlines()[:4] == [
        *("A: 1 times in 1-8", "  1 x library mm", "B: 2 times in 1-8, 2 times in 1-64", "  1 x library mm"),
    ]
    assert texts["kernels_per_step.txt"].splitlines() == [
        *("1-8: 12", "  5 x op compiled_engine::silu_mul", "  4 x library mm", f"  3 x splitting op {ATTENTION}"),
        *("1-64: 11", "  5 x op compiled_engine::silu_mul", f"  3 x splitting op {ATTENTION}", "  3 x library mm"),
        "logits/1-64: 0",
    ]
    assert texts["modules.txt"].splitlines() == [
        *("model: Model", "  layers: layers", "    layers.0: 0 x 3"),
        *(f"      layers.0.{name}: {name} weight float32[8, 8]" for name in ("q_proj", "k_proj", "down")),
    ]
    assert texts["1-64/graph.txt"] == "graph of 1-64\n"
    assert texts["trace/aten_graph.txt"] == "the trace\n"
    assert texts["notes.txt"] == "mine"


def test_the_page_has_the_figures(entry: Path) -> None:
    """Bars lie under their parents, on one scale; values are rounded to three digits."""
    report = report_of(entry, metrics={"kernels_per_decode_step": 77, "graph_bytes_by_key": {}})
    capture = {"kind": "decode", "size": 9, "bytes": 3 << 29}
    page = render_html(replace(report, data=report.data | {"captures": [capture, capture | {"bytes": 5 << 19}]}))
    words = " ".join(page.split())
    for text in ("1.5 GiB", "2.5 MiB", "launched <strong>77</strong> kernels", "piece B", "aaaaaaaa</code>"):
        assert text in words, text
    for text in (">None (3 times)<", ">1, 2<", ">none<", "config.model.num_layers", "model.sliding_windows"):
        assert text in words, text
    assert "500 ms" in words  # of the first pass
    assert "250 ms" in words
    assert "1.50 s" in words  # of piece B
    assert '<span class="figure">5</span><span class="muted">made by the engine</span>' in words
    assert '<span class="figure">1</span><span class="bad">nothing accounts for them</span>' in words
    assert "This start-up, up to the first token" in words
    assert "This process, which looked the entry up" not in words
    assert "reasons.device" not in words
    assert "found one" in words
    assert "graph.decode_sizes" in words
    assert "graph.decode_sizes" not in render_html(
        replace(report, data=report.data | {"config": CONFIG | {"device": "cpu"}})
    )
    assert "This process, which looked the entry up" in render_html(report_of(entry))


def test_bars_of_a_waterfall_are_on_one_scale_below_their_parents(entry: Path) -> None:
    spans = [
        {"name": "inner", "start_s": 12.0, "seconds": 2.0, "parent": "load"},
        {"name": "load", "start_s": 10.0, "seconds": 5.0, "parent": None},
        {"name": "innermost", "start_s": 13.0, "seconds": 1.0, "parent": "inner"},
        {"name": "later", "start_s": 15.0, "seconds": 5.0, "parent": "not shown"},
        {"name": f"piece {INNER}", "start_s": 19.0, "seconds": 1.0, "parent": None},
    ]
    bars = waterfall(spans, {INNER: "B"})
    assert [(bar.name, bar.depth, bar.start_s, bar.seconds, bar.left, bar.width) for bar in bars] == [
        ("load", 0, 0.0, 5.0, 0.0, 50.0),
        ("inner", 1, 2.0, 2.0, 20.0, 20.0),
        ("innermost", 2, 3.0, 1.0, 30.0, 10.0),
        ("later", 0, 5.0, 5.0, 50.0, 50.0),
        ("piece B", 0, 9.0, 1.0, 90.0, 10.0),
    ]
    assert waterfall([], {}) == []
    (alone,) = waterfall([{"name": "a", "start_s": 3.0, "seconds": 0.0, "parent": None}], {})
    assert (alone.left, alone.width) == (0.0, 0.0)


def test_pieces_beyond_the_alphabet_have_two_letters(tmp_path: Path) -> None:
    keys = [f"{number:020}" for number in range(80)]
    steps = tuple(call(key, None, (number,), (number + 1,)) for number, key in enumerate(keys))
    plan = Plan(("x",), (Source("argument", "x"),), steps, (80,))
    write_compiled_range(tmp_path, CompiledRange("forward", CompileRange(1, 64), plan, ("x",), ()), [])
    (tmp_path / "pieces").mkdir()
    for key in keys:
        (tmp_path / "pieces" / f"{key}.json").write_text(json.dumps(GRAPH))
    replace(RECORD, pieces=tuple(PieceRecord(key, 0.0, None) for key in keys)).write(tmp_path)
    names = [piece["name"] for piece in report_of(tmp_path).data["pieces"]]
    assert (names[:2], names[25:28], names[51:53], names[77:]) == (
        *(["A", "B"], ["Z", "AA", "AB"], ["AZ", "BA"], ["BZ", "CA", "CB"]),
    )


def test_launches_of_a_decode_step_are_the_difference_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU has launches to count."""
    asked: list[int] = []

    def count(work: Any) -> int:
        work()
        return 10 + 7 * asked[-1]

    monkeypatch.setattr(kernels, "_kernels", count)
    assert kernels.kernels_per_decode_step(asked.append, torch.device("cpu")) is None
    assert asked == []
    assert kernels.kernels_per_decode_step(asked.append, torch.device("cuda", 0)) == 7


def test_calls_of_what_has_no_name_launch_nothing() -> None:
    code = "def call(args):\n    kernels[0](args)\n    make()(args)\n    extern_kernels.mm(args)\n    a.b().c(args)\n"
    assert [(kernel.name, kernel.launches) for kernel in kernels.kernels_of(code)] == [("mm", 1)]
