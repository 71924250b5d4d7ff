"""`bench table` and `bench compare`: rows, their figures, peers, plots and verdicts. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folders import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from compiled_engine.bench import table as table_module
from compiled_engine.bench.bounds import Rates, model_sizes
from compiled_engine.bench.processes import ProcessError
from compiled_engine.bench.shapes import write_shape
from compiled_engine.bench.table import make_plan, measure
from compiled_engine.bench.table_comparison import compare, is_slower, with_peers
from compiled_engine.bench.table_rows import BUNDLED, ON_A_CPU, MixedStep, Start, chosen, known_rows, rows_of
from compiled_engine.cli.app import app
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.process.progress import SilentProgress

PEERS = REPOSITORY / "docs" / "measurements" / "peers.json"
KEYS = {"benchmark", "rows", "date", "machine", "versions", "models", "options", "rates", "notes", "seconds", "command"}
PNG = b"\x89PNG\r\n"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_every_kind_of_row_is_measured_beside_its_bound_and_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []

    def start(options: Any, workload: Any) -> dict[str, Any]:
        starts.append(options["mode"])
        return {"wall_s": 1.0 + len(starts), "cache": "off", "start_up": []}

    monkeypatch.setattr("compiled_engine.bench.start_up.run_worker", start)
    peers = tmp_path / "peers.json"
    rows = [{"id": "bundled-tpot-1", "x": 1e6, "y": [1e6, 2e6]}, {"id": "bundled-T", "y": 1}, {"id": "other", "x": 1}]
    peers.write_text(json.dumps({"engines": {"x": "engine X", "y": "Y"}, "rows": rows}))
    kept = tmp_path / "new" / "table.json"
    ids = [*(f"bundled-{name}" for name in ON_A_CPU), "curve-bundled-batch-1", "curve-bundled-batch-2"]
    arguments = ["--rows", "bundled-*", "--rows", "curve-bundled-batch-[12]", "--peer", str(peers), "--mode", "eager"]
    plots = tmp_path / "plots"
    result = run("table", *arguments, "--repeats", "1", "--plots", str(plots), "--output", str(kept))
    assert result.exit_code == 0, result.stderr
    for text in (*ids, "engine", "share", "TFLOP/s", "a copy of 256 MiB"):
        assert text in result.stdout
    table = json.loads(kept.read_text())
    assert table.keys() == KEYS
    assert [row["id"] for row in table["rows"]] == ids
    for row in table["rows"]:
        measured = row["measured"]
        low, high = measured["spread"]
        assert 0 < low <= measured["median"] <= high
        assert measured["n"] == 1
        ratio = row["measured"]["median"] / row["bound"]
        assert row["share_of_bound"] == pytest.approx(ratio if row["better"] == "higher" else 1 / ratio)
    found = {row["id"]: row for row in table["rows"]}
    tpot = found["bundled-tpot-1"]
    assert tpot["peers"]["engine X"] == {"figure": [1e6, 1e6], "ratio": 1e6 / tpot["measured"]["median"]}
    assert tpot["peers"]["Y"]["figure"] == [1e6, 2e6]
    assert found["bundled-T"]["peers"] == {"Y": {"figure": [1, 1], "ratio": found["bundled-T"]["measured"]["median"]}}
    assert "peers" not in found["bundled-short"]
    assert starts == ["eager", "eager"]
    assert [found[f"bundled-start-{kind}"]["measured"]["median"] for kind in ("cold", "warm")] == [2.0, 3.0]
    (drawn,) = plots.iterdir()
    assert (drawn.name, drawn.read_bytes()[:6]) == ("curve_bundled_model_batch.png", PNG)
    again = run("plot", str(kept), "--output", str(tmp_path / "again"))
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "again" / drawn.name).read_bytes() == drawn.read_bytes()
    same = run("compare", str(kept), str(kept), "--fail-on-slower")
    assert same.exit_code == 0
    assert f"{len(ids)} same" in " ".join(same.stdout.split()), "a long path may break the line"


def test_rows_share_engines_and_starts_come_last(tmp_path: Path) -> None:
    plan = make_plan({"device": "cpu"}, [], with_curves=False, folder=tmp_path)
    assert [(engine.starts, len(engine.rows)) for engine in plan.engines] == [(False, len(ON_A_CPU) - 2), (True, 2)]
    assert plan.ids == tuple(f"bundled-{name}" for name in ON_A_CPU)


def test_an_own_model_has_the_rows_that_fit_it(tmp_path: Path) -> None:
    given = {"device": "cpu", "model": str(BUNDLED_MODEL_PATH), "max_model_len": 400}
    plan = make_plan(given, [], with_curves=False, folder=tmp_path)
    assert set(plan.ids) == {f"model-{name}" for name in ON_A_CPU if name != "prefill-2x500"}
    assert plan.notes == ("left out: max_model_len is 400; row model-prefill-2x500 needs at least 501",)
    with pytest.raises(ValueError, match="max_model_len is 400; row model-prefill-2x500 needs at least 501"):
        make_plan(given, ["model-prefill-*"], with_curves=False, folder=tmp_path)


def test_a_mixed_step_needs_the_tokens_that_drafts_may_yield() -> None:
    alone, drafted = (MixedStep(4, 100).needs(tokens) for tokens in (1, 5))
    assert drafted.longest - 128 == 5 * (alone.longest - 128)
    assert drafted.together - alone.together == 4 * (drafted.longest - alone.longest)


def test_what_fails_has_an_error_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Any, workload: Any) -> Any:
        raise ProcessError("ended with exit code 1")

    monkeypatch.setattr("compiled_engine.bench.start_up.run_worker", fail)
    # Blocks of 16 tokens: eight requests of 16 + 33 tokens find no room, one does.
    given = {"device": "cpu", "mode": "eager", "num_blocks": 20, "block_size": 16}
    patterns = ["bundled-tpot-*", "bundled-start-cold"]
    plan = make_plan(given, patterns, with_curves=False, folder=tmp_path)
    told: list[int] = []
    result = measure(plan, 1, SilentProgress(), lambda result: told.append(len(result["rows"])))
    one, eight, cold = result["rows"]
    assert "measured" in one
    assert "the KV cache holds" in eight["error"]
    assert (cold["error"], cold["bound"]) == ("ended with exit code 1", None)
    assert told == [1, 2, 3]
    plan = make_plan(given | {"num_blocks": 1}, ["bundled-tpot-1"], with_curves=False, folder=tmp_path)
    monkeypatch.setattr(table_module, "LLM", None)
    (row,) = measure(plan, 1, SilentProgress(), lambda result: None)["rows"]
    assert row["error"].startswith("TypeError")


def test_a_failed_row_is_named_and_the_others_are_shown() -> None:
    small = ["--mode", "eager", "--num-blocks", "20", "--block-size", "16"]
    result = run("table", "--rows", "bundled-tpot-*", "--repeats", "1", *small)
    assert result.exit_code == 1
    assert "row bundled-tpot-8: ValueError: the KV cache holds" in result.stderr
    assert "failed" in result.stdout


def test_rows_are_measured_in_the_order_of_the_patterns_and_shown_in_their_own(tmp_path: Path) -> None:
    rows = rows_of(BUNDLED, ON_A_CPU, on_gpu=False)
    patterns = ["bundled-T", "bundled-tpot-?", "bundled-T*"]
    ids = ["bundled-T", "bundled-tpot-1", "bundled-tpot-8", "bundled-T-penalties", "bundled-T-logprobs", "bundled-T-n4"]
    assert [row.id for row in chosen(rows, rows, patterns)] == ids
    assert not any(row.curve for row in chosen(rows, rows, ["bundled-*"]))
    plan = make_plan({"device": "cpu"}, patterns, with_curves=False, folder=tmp_path)
    assert [row.id for engine in plan.engines for row in engine.rows] == ids
    assert plan.ids == tuple(row.id for row in rows if row.id in ids)


def test_a_pattern_chooses_rows_of_the_device_where_it_can() -> None:
    for on_gpu, prefixes in ((True, {"0.6b", "8b"}), (False, {"bundled"})):
        known, default = known_rows(on_gpu=on_gpu, own_model=False)
        assert {row.subject.prefix for row in chosen(known, default, ["curve-*"])} == prefixes
        assert {row.subject.prefix for row in chosen(known, default, ["8b-*", "bundled-T"])} == {"8b", "bundled"}


@pytest.mark.parametrize("own_model", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_ids_are_unique_and_what_is_measured_by_default_is_known(on_gpu: bool, own_model: bool) -> None:
    rows, default = known_rows(on_gpu=on_gpu, own_model=own_model)
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids)
    assert {row.id for row in default} <= set(ids)


def test_peers_that_are_published_are_of_rows_that_exist() -> None:
    rows, _ = known_rows(on_gpu=True, own_model=False)
    published = {row["id"] for row in json.loads(PEERS.read_text())["rows"]}
    assert published <= {row.id for row in rows}


@pytest.mark.parametrize(("better", "ratio"), [("lower", 1.5), ("higher", 0.5)])
def test_the_ratio_is_to_the_best_figure_of_a_peer(better: str, ratio: float) -> None:
    found = with_peers(row_of("one", 1, 2, 3, better), {"one": {"X": [3.0, 4.0]}, "two": {"X": [1.0, 1.0]}})
    assert found["peers"] == {"X": {"figure": [3.0, 4.0], "ratio": ratio}}
    assert "peers" not in with_peers(row_of("three", 1, 2, 3, better), {"one": {"X": [3.0, 4.0]}})


def test_bounds_are_those_of_the_published_peers(tmp_path: Path) -> None:
    """At the rates that are known of an H200, as far as they were rounded there."""
    rows, _ = known_rows(on_gpu=True, own_model=False)
    found = {row.id: row for row in rows}
    rates = Rates(4.3e12, 790e12, "")
    sizes = {}
    for shape in ("qwen3-0.6b", "qwen3-8b"):
        folder = write_shape(tmp_path / shape, shape)
        about = {"dtype": "bfloat16", "max_model_len": 4096, "load_format": "dummy", "seed": 0, "device_type": "cuda"}
        config, _ = read_model_config(folder, **about)
        sizes[shape] = model_sizes(config)
    for peer in json.loads(PEERS.read_text())["rows"]:
        row = found[peer["id"]]
        assert row.subject.shape is not None
        if "bound" in peer and not isinstance(row.workload, Start):
            bound = row.workload.bound(sizes[row.subject.shape], rates, 256)
            assert bound == pytest.approx(peer["bound"], rel=0.03)


def result_of(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"processor": "p", "cores": 2}
    return {"benchmark": "table", "rows": list(rows), "machine": machine, "versions": {"torch": "2"}, "options": {}}


def row_of(name: str, low: float, median: float, high: float, better: str = "lower", **more: Any) -> dict[str, Any]:
    row = {
        "id": name,
        "model": "m",
        "what": "w",
        "unit": "ms",
        "better": better,
        "options": {},
        "workload": {"kind": "k"},
    }
    return row | {"measured": {"median": median, "spread": [low, high], "n": 3}} | more


positive = st.floats(min_value=1e-3, max_value=1e6)


@given(
    a=st.tuples(positive, positive, positive),
    b=st.tuples(positive, positive, positive),
    better=st.sampled_from(["lower", "higher"]),
    noise=st.floats(min_value=0, max_value=0.5),
)
def test_the_verdict_turns_with_the_order_and_is_same_where_spreads_overlap(
    a: Any, b: Any, better: str, noise: float
) -> None:
    one, other = (result_of(row_of("r", *sorted(values), better)) for values in (a, b))
    (forward,) = compare(one, other, noise)["rows"]
    (backward,) = compare(other, one, noise)["rows"]
    opposite = {"faster": "slower", "slower": "faster", "same": "same"}
    assert backward["verdict"] == opposite[forward["verdict"]]
    low, high = max(min(a), min(b)), min(max(a), max(b))
    if low <= high:
        assert forward["verdict"] == "same"
    elif forward["verdict"] != "same":
        b_is_less = max(b) < min(a)
        assert (forward["verdict"] == "faster") == (b_is_less == (better == "lower"))
    else:
        medians = sorted([sorted(a)[1], sorted(b)[1]])
        assert medians[1] / medians[0] <= 1 + noise + 1e-9


def test_a_comparison_says_what_it_cannot_compare(tmp_path: Path) -> None:
    failed = {key: value for key, value in row_of("f", 1, 1, 1).items() if key != "measured"} | {"error": "boom"}
    a = result_of(row_of("x", 1, 2, 3), row_of("f", 1, 1, 1), row_of("w", 1, 1, 1), row_of("a", 1, 1, 1))
    b = result_of(row_of("x", 4, 5, 6), failed, row_of("w", 1, 1, 1, workload={"kind": "z"}), row_of("b", 1, 1, 1))
    b["machine"] = {"processor": "q", "cores": 2}
    found = compare(a, b, 0.01)
    assert {row["id"]: row["verdict"] for row in found["rows"]} == {"x": "slower", "f": "failed"}
    assert found["counts"] == {"slower": 1, "failed": 1}
    assert found["rows"][0]["gain"] == 2 / 5
    notes = ["machine processor: p and q", "only in A: a", "only in B: b", "measured differently: w"]
    assert found["notes"] == notes
    assert is_slower(found)
    assert [row["verdict"] for row in compare(b, a, 0.01)["rows"]] == ["faster", "repaired"]
    paths = []
    for name, result in (("a", a), ("b", b)):
        paths.append(str(tmp_path / f"{name}.json"))
        Path(paths[-1]).write_text(json.dumps(result))
    shown = run("compare", *paths)
    assert shown.exit_code == 0
    for text in (*notes, "1 slower, 1 failed"):
        assert text in shown.stdout
    assert run("compare", *paths, "--fail-on-slower").exit_code == 1
    assert json.loads(run("compare", *paths, "--json").stdout) == found


def test_the_list_names_all_rows_and_measures_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "LLM", None)
    shown = run("table", "--list").stdout
    rows, _ = known_rows(on_gpu=False, own_model=False)
    assert [line.split()[0] for line in shown.splitlines()] == [row.id for row in rows]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table", "--rows", "bundled-topt-1"], "there is no row 'bundled-topt-1'; did you mean 'bundled-tpot-1'?"),
        (["table", "--rows", "x*"], "there is no row 'x*' (--list shows all)"),
        (["table", "--rows", "bundled-T", "--plots", "plots"], "with no point of a plot; allowed with plots"),
        (["table", "--rows", "bundled-T", "--max-model-len", "64"], "max_model_len is 64; row bundled-T needs"),
        (["table", "--rows", "bundled-tpot-8", "--max-num-seqs", "2"], "row bundled-tpot-8 needs at least 8"),
        (["table", "--peer", "missing.json"], "peer is 'missing.json'; allowed: a JSON file"),
        (["table", "--peer", __file__], "which is no JSON"),
        (["table", "--output", str(Path(__file__).parent)], "a folder; allowed: a file"),
        (["table", "--repeats", "0"], "--repeats"),
        (["compare", "missing.json", "x"], "A.json is 'missing.json'; allowed: a JSON file"),
        (["compare", str(PEERS), str(PEERS)], "allowed: a JSON file of bench table"),
        (["plot", str(PEERS), "--output", "x"], "allowed: a JSON file of bench ablation or bench table"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_wrong_input_is_named_before_work_starts(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table_module, "LLM", None)
    monkeypatch.setattr("subprocess.Popen", None)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "content", [[], {}, {"engines": {"x": "X"}, "rows": [{"id": "r", "x": "fast"}]}, {"engines": 1}]
)
def test_peers_of_another_form_are_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(content))
    result = run("table", "--rows", "bundled-T", "--peer", str(path))
    assert result.exit_code == 2
    assert "which has not the form" in result.stderr
