"""What `compiled-engine inspect` says of the bundled model, as JSON and as text files."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from inspect_cases import COMPILED, EAGER, NUM_LAYERS, RANGES, SMALL, inspect, inspect_json
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig, json_value
from compiled_engine.features.speculation.graph_keys import FIRST, model_keys
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.inspection.report import make_report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    inspect_json(*COMPILED)
    return inspect_json(*COMPILED)


def test_every_enabled_pass_is_at_its_contract(report: dict[str, Any]) -> None:
    passes = {(one["name"], one["range"]): one for one in report["passes"]}
    assert all(one["matches"] == one["contract"] for one in passes.values())
    of_others = {"all_reduce_residual_rms_norm", "sequence_parallel", "quantise_activations", "reorder_codes"}
    assert {name for name, _ in passes if not passes[name, RANGES[0]]["enabled"]} == of_others
    per_layer = {"merge_linears": 2, "residual_rms_norm": 2, "rope_kv_write": 1, "silu_mul": 1}
    for name in RANGES:
        assert {key: passes[key, name]["matches"] for key in per_layer} == {
            key: count * NUM_LAYERS for key, count in per_layer.items()
        }
    small, dynamic = (passes["small_batch_linear", name] for name in RANGES)
    assert (small["applied"], small["matches"]) == (True, 4 * NUM_LAYERS + 1)
    assert not dynamic["applied"]
    assert dynamic["reason"]
    assert [passes["gated_linear", name]["matches"] for name in RANGES] == [0, NUM_LAYERS]


def test_a_warm_cache_is_enough(report: dict[str, Any]) -> None:
    assert report["cache"]["status"] == "hit"
    now = {span["name"] for span in report["phases"]["start_up"]}
    then = {span["name"] for span in report["phases"]["build"]}
    assert "trace" not in now
    assert "load" in now
    assert "compile" not in now | {span["parent"] for span in report["phases"]["start_up"]}
    assert {"trace", "compile pieces", *(f"passes {name}" for name in RANGES)} <= then
    assert {f"piece {piece['key']}" for piece in report["pieces"] if RANGES[1] in piece["ranges"]} <= then


def test_the_phases_of_the_build_lie_within_it(report: dict[str, Any]) -> None:
    spans = {span["name"]: span for span in report["phases"]["build"]}
    whole = spans["compile pieces"]
    for piece in (piece for piece in report["pieces"] if RANGES[1] in piece["ranges"]):
        part = spans[f"piece {piece['key']}"]
        assert part["parent"] == "compile pieces"
        assert part["start_s"] >= whole["start_s"] >= 0
        assert part["start_s"] + part["seconds"] <= whole["start_s"] + whole["seconds"] + 1e-3


def test_three_pieces_a_range_and_what_they_launch(report: dict[str, Any]) -> None:
    for name in RANGES:
        used = {piece["key"]: piece["uses"][name] for piece in report["pieces"] if name in piece["ranges"]}
        assert sorted(used.values()) == [1, 1, NUM_LAYERS - 1]
        steps = next(one["steps"] for one in report["ranges"] if one["name"] == name)
        assert {key: sum(step["piece"] == key for step in steps) for key in used} == used
        counts = report["kernels_per_step"][name]
        assert counts["by_kind"]["splitting op"] == sum(step["op"] is not None for step in steps) == NUM_LAYERS
        pieces = [piece for piece in report["pieces"] if name in piece["ranges"]]
        launches = sum(used[piece["key"]] * kernel["launches"] for piece in pieces for kernel in piece["kernels"])
        assert counts["total"] == launches + NUM_LAYERS
        assert all(piece["kernels"] for piece in pieces)
        # Those of the small range run as they stand, from kernels in C++; the others Inductor has compiled.
        assert all((piece["seconds"] > 0) == (name == RANGES[1]) for piece in pieces)


def test_modules_lead_to_their_pieces(report: dict[str, Any]) -> None:
    model = report["modules"]["children"][0]
    (layer,) = next(child for child in model["children"] if child["path"] == "model.layers")["children"]
    assert layer["count"] == NUM_LAYERS
    attention = next(child for child in layer["children"] if child["path"].endswith("self_attn"))
    query = next(child for child in attention["children"] if child["path"].endswith("q_proj"))
    assert query["parameters"][0]["name"] == "weight"
    for name in RANGES:
        where = {use["instances"] for use in query["pieces"] if use["range"] == name}
        assert where == {"0", f"1-{NUM_LAYERS - 1}"}
    inner = next(piece for piece in report["pieces"] if piece["uses"] == {RANGES[0]: NUM_LAYERS - 1})
    assert f"model.layers.{{1-{NUM_LAYERS - 1}}}.self_attn.q_proj" in inner["modules"]
    assert f"model.layers.{{0-{NUM_LAYERS - 2}}}.mlp.down_proj" in inner["modules"]


def test_every_guard_is_accounted_for(report: dict[str, Any]) -> None:
    reasons: dict[str, set[str]] = {}
    for guard in report["guards"]:
        reasons.setdefault(guard["subject"], set()).add(guard["discharged"])
    subjects = ("input sizes", "asserted sizes", "state of torch", "parameters", "model", "code", "inputs")
    assert reasons.keys() == set(subjects)
    assert all(len(found) == 1 and "" not in found for found in reasons.values())
    tokens = next(symbol for symbol in report["symbols"] if symbol["name"] == "tokens")
    assert (tokens["low"], tokens["high"]) == (1, 64)
    assert "input_ids_T.shape[0]" in tokens["places"]


def test_the_cache_and_the_configuration(report: dict[str, Any]) -> None:
    cache = report["cache"]
    assert Path(cache["folder"]).name == cache["key"]
    assert cache["size"] > 0
    assert cache["factors"]["config"]["model.num_layers"] == NUM_LAYERS
    assert report["config"]["scheduler"]["max_num_batched_tokens"] == 64
    assert "model.path" in report["config"]["reasons"]
    assert report["captures"] == []
    assert "captures" not in report["notes"]


def test_the_text_folder_can_be_compared(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        inspect(*COMPILED, "--text", str(folder))
    names = [path.relative_to(first).as_posix() for path in first.rglob("*") if path.is_file()]
    for name in RANGES:
        assert {f"{name}/graph.txt", f"{name}/forward.py", f"{name}/passes/01_merge_linears.diff"} <= set(names)
        assert {f"{name}/piece_{number}{suffix}" for number in (1, 2, 3) for suffix in (".txt", ".py")} <= set(names)
    assert {"trace/bytecode.txt", "trace/dynamo_graph.txt", "trace/aten_graph.txt"} <= set(names)
    _, differ, errors = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (set(differ) - {"times.json"}, errors) == (set(), [])
    assert f"{RANGES[0]} merge_linears: {2 * NUM_LAYERS} of {2 * NUM_LAYERS}" in (first / "passes.txt").read_text()
    bytecode = (first / "trace" / "bytecode.txt").read_text()
    assert "def traced(" in bytecode
    assert " = __compiled_fn(" in bytecode  # without the part that is random


def test_diffs_show_what_went_before_what_came(tmp_path: Path) -> None:
    """Wherever lines change, those that went come first."""
    inspect(*COMPILED, "--text", str(tmp_path))
    signs = [[line[0] for line in path.read_text().splitlines()] for path in tmp_path.rglob("*.diff")]
    assert any(pair == ("-", "+") for diff in signs for pair in pairwise(diff))
    assert not any(pair == ("+", "-") for diff in signs for pair in pairwise(diff))


def test_a_folder_gets_the_page_and_the_texts(tmp_path: Path) -> None:
    inspect(*COMPILED, "-o", f"{tmp_path}/new/")
    assert (tmp_path / "new" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "new" / "text" / "passes.txt").exists()


def test_without_a_compiler_the_report_says_so() -> None:
    report = inspect_json(*EAGER)
    assert (report["passes"], report["pieces"], report["modules"]) == ([], [], None)
    assert "eager" in report["notes"]["compile"]


def test_a_run_adds_its_start_up() -> None:
    report = inspect_json(*COMPILED, "--run")
    top = [span for span in report["phases"]["start_up"] if span["parent"] is None]
    assert {"load", "load weights", "warm up", "first token"} <= {span["name"] for span in top}
    for before, after in pairwise(top):
        assert before["start_s"] + before["seconds"] <= after["start_s"] + 1e-3
    assert (report["metrics"]["traces"], report["metrics"]["compiles"]) == (0, 0)
    assert "run" not in report["notes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to write"),
        (["--json", "--mode", "fast"], "mode is 'fast'"),
        (["--depyf", "folder", "--mode", "eager"], "nothing is compiled"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_depyfs_folder_and_torchs_structured_trace(tmp_path: Path, bundled_model_path: Path) -> None:
    """A layer without weights in a process of its own: nothing reads them, and only JSON is on stdout."""
    config = json.loads((bundled_model_path / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = [sys.executable, "-c", "from compiled_engine.cli import main; main()", "inspect"]
    arguments = [*SMALL, "--compile-workers", "0", "--model", str(tmp_path), "--load-format", "dummy", "--no-cache"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_TRACE": str(tmp_path / "trace")}
    subprocess.run([*program, *arguments, "--depyf", str(tmp_path / "depyf")], check=True, env=environment)
    names = [path.name for path in (tmp_path / "depyf").iterdir()]
    assert any(name.startswith("__transformed_code") for name in names)
    assert any("kernel" in name for name in names)
    log = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    for stage in (
        "trace_aten_graph",
        "1-64_passes_01_merge_linears",
        "1-64_graph",
        "1-64_plan",
        "1-64_forward",
        "pieces_",
    ):
        assert f'"compiled_engine.{stage}' in log
    assert "aten.mm.default" in log


@pytest.mark.parametrize(("num_drafts", "has_draft_model"), [(0, False), (3, False), (3, True)])
def test_the_captures_are_those_of_the_dispatcher(num_drafts: int, has_draft_model: bool) -> None:
    short = ((2, 50), (2, 90))
    graph = GraphConfig(GraphMode.FULL, (1, 2, 8), (4, 16), short, short[1:])
    scheduler = SchedulerConfig(8, 16, 128, "fcfs")
    config = {
        "device": "cuda",
        "graph": json_value(graph),
        "scheduler": json_value(scheduler),
        "speculation": {"num_tokens": num_drafts},
    }
    draft_graph = GraphConfig(
        GraphMode.FULL_DECODE_ONLY, (1, 2, 8), short_decodes=((2, 50),), short_verified=((2, 50),)
    )
    if has_draft_model:
        config["speculation"]["draft"] = {"graph": json_value(draft_graph)}
    captures = make_report(config, None, []).data["captures"]
    names = [f"{capture['kind']} {capture['size']}" for capture in captures]
    keys = Dispatcher(graph, scheduler, query_lens=(1 + num_drafts,) if num_drafts else ()).keys
    if has_draft_model:
        keys += tuple(model_keys(Dispatcher(draft_graph, scheduler, query_lens=(FIRST,)), (num_drafts,)))
    assert sorted(names) == sorted(key.name for key in keys)


@pytest.mark.gpu
def test_a_run_on_a_gpu_measures_launches_and_captures() -> None:
    report = inspect_json("--quiet", "--max-num-seqs", "4", "--max-model-len", "64", "--num-blocks", "64", "--run")
    assert [capture["size"] for capture in report["captures"] if capture["kind"] == "decode"] == [1, 2, 4]
    # Counted from the memory that is free on the GPU, which other processes take and give back.
    assert all(isinstance(capture["bytes"], int) for capture in report["captures"])
    assert report["metrics"]["kernels_per_decode_step"] > 0
    # With the default passes nothing on a GPU is left to Inductor: ops of ours, and the library's products.
    kinds = {kernel["kind"] for piece in report["pieces"] for kernel in piece["kernels"]}
    assert kinds == {"op", "library"}
