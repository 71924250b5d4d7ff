"""The loss of an ablation's variants on a text: which are compared, with what, and what fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_bench import a_result
from typer.testing import CliRunner

from compiled_engine import LLM
from compiled_engine.bench import ablation
from compiled_engine.bench.ablation import NO_LOSS_NOTE, Asked, make_plan
from compiled_engine.bench.held_out_loss import WINDOW
from compiled_engine.bench.processes import ProcessError
from compiled_engine.bench.shapes import write_shape
from compiled_engine.bench.text_workload import MOST_BYTES, MOST_WINDOWS, TextWorkload, compare_on_text, most_windows
from compiled_engine.bench.variants import Variant
from compiled_engine.bench.worker_workloads import measure
from compiled_engine.cli.app import app
from compiled_engine.cli.bench_ablation import ablation_table
from compiled_engine.process.progress import SilentProgress

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = Variant("compiled", {"mode": "eager"})
CODED = Variant("compiled, int8 cache", {"mode": "eager", "kv_cache_dtype": "int8"})
ROUNDED = Variant("compiled in fp8", {"mode": "compiled", "quantization": "fp8"})


def in_this_process(options: Mapping[str, Any], task: Mapping[str, Any] | None) -> dict[str, Any]:
    assert task is not None
    with LLM(**options) as llm:
        return json.loads(json.dumps(measure(json.loads(json.dumps(task)), llm)))  # type: ignore[no-any-return]


def test_variants_are_compared_with_the_first_on_the_same_tokens(bundled_model_path: Path) -> None:
    text = (bundled_model_path / "held_out.txt").read_text()[:200]
    shared = {"device": "cpu", "progress": False, "num_blocks": 128, "max_num_seqs": 2}
    found, errors = compare_on_text(PLAIN, [CODED], shared, TextWorkload(text, 1), SilentProgress(), in_this_process)
    assert not errors
    base, coded = found[PLAIN.name], found[CODED.name]
    assert base.keys() == {"num_tokens", "loss"}
    assert 20 < base["num_tokens"] == coded["num_tokens"] < 200
    assert coded["difference"] == pytest.approx(coded["loss"] - base["loss"])
    assert 0 < coded["divergence"]["mean"] < coded["divergence"]["p99"] < 0.01
    assert 0.9 < coded["same_best"] <= 1


@pytest.mark.parametrize(("fails", "named"), [(CODED.name, {PLAIN.name, ROUNDED.name}), (PLAIN.name, set())])
def test_a_variant_that_fails_is_told_and_others_are_compared(fails: str, named: set[str]) -> None:
    calls: list[str] = []

    def run(options: Mapping[str, Any], task: Mapping[str, Any] | None) -> dict[str, Any]:
        name = next(each.name for each in (CODED, ROUNDED, PLAIN) if each.options.items() <= options.items())
        calls.append(name)
        if name == fails:
            raise ProcessError("boom")
        return {"num_tokens": 7, "row": {"loss": 2.0 + len(calls)}}

    found, errors = compare_on_text(PLAIN, [CODED, ROUNDED], {}, TextWorkload("a b", 1), SilentProgress(), run)
    assert errors == {fails: "boom"}
    assert found.keys() == named
    assert found == {} or found[ROUNDED.name]["difference"] == 2.0


@pytest.mark.parametrize(
    ("variants", "text", "measured"),
    [(("compiled",), None, False), (("compiled in fp8",), None, True), (("compiled, int8 cache",), "def f():", True)],
)
def test_only_variants_that_round_are_compared(variants: tuple[str, ...], text: str | None, measured: bool) -> None:
    plan = make_plan({"device": "cpu"}, None, Asked(quick=True, variants=variants, text=text))
    assert (plan.text is not None) == measured
    assert NO_LOSS_NOTE not in plan.notes
    if text is not None:
        assert plan.text == TextWorkload(text, 1)


def test_random_weights_have_no_loss(tmp_path: Path) -> None:
    options = {"device": "cpu", "model": str(write_shape(tmp_path, "qwen3-0.6b")), "load_format": "dummy"}
    plan = make_plan(options, "qwen3-0.6b", Asked(quick=True, variants=("compiled in fp8",)))
    assert plan.text is None
    assert NO_LOSS_NOTE in plan.notes


def test_a_text_needs_a_variant_that_rounds(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("def f():")
    command = ["bench", "ablation", "--quick", "--variant", "compiled", "--text", str(tmp_path / "text")]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == 2
    assert "text is given, but no variant rounds; allowed: with one of compiled in fp8, compiled in" in done.stderr


@pytest.mark.parametrize(("vocab_size", "expected"), [(1000, MOST_WINDOWS), (151_936, 3), (10**9, 1)])
def test_distributions_fit_into_some_memory(vocab_size: int, expected: int) -> None:
    assert most_windows(vocab_size) == expected
    assert expected == 1 or 4 * vocab_size * WINDOW * expected <= MOST_BYTES


def test_the_table_shows_loss_and_divergence() -> None:
    figures = {"median": 1.0, "spread": [1.0, 1.0]}
    record = {
        "options": {}, "tpot_ms": {"1": figures}, "step_ms": {"1": figures}, "mixed_step_ms": figures,
        "prefill_tokens_per_s": figures, "start_up_s": figures, "kernels": None, "memory_bytes": None,
    }  # fmt: skip
    of_text = {"num_tokens": 9, "loss": 2.01, "divergence": {"mean": 0.0038, "p99": 0.02}, "same_best": 0.97}
    result = {
        "variants": [
            {"name": "eager", **record},
            {"name": PLAIN.name, **record, "text": {"num_tokens": 9, "loss": 2.0}},
            {"name": ROUNDED.name, **record, "text": of_text},
        ],
        "bound": {"tpot_ms": {"1": 1.0}, "step_ms": {"1": 1.0}, "mixed_step_ms": 1.0, "prefill_tokens_per_s": 1.0},
        "model": {"name": "m", "dtype": "float32"},
        "machine": {"processor": "p"},
    }
    table = ablation_table(result)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["loss"][:3] == ["", "2.0000", "2.0100"]
    assert cells["KL"][:3] == ["", "", "3.8e-03"]


@pytest.mark.parametrize("fails", [None, "compiled", "compiled in fp8"])
def test_a_result_has_the_figures_of_variants_that_round(fails: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine is run for them though it is no variant here."""

    def run(options: Mapping[str, Any], task: Mapping[str, Any] | None, limit_s: float = 0) -> dict[str, Any]:
        if task is None or task["kind"] != "text":
            return a_result(1.0)
        name = "compiled in fp8" if "quantization" in options else "compiled"
        if name == fails:
            raise ProcessError("ended with exit code 1")
        return {"num_tokens": 7, "row": {"loss": 2.0 if name == "compiled" else 2.5}}

    for function in (ablation.measure, ablation.compare_on_text):
        monkeypatch.setattr(function, "__defaults__", (run,))
    command = ["bench", "ablation", "--quick", "--variant", "eager", "--variant", "compiled in fp8", "--json"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == (0 if fails is None else 1), done.output
    eager, rounded = json.loads(done.stdout)["variants"]
    assert "text" not in eager
    if fails is None:
        assert rounded["text"] == {"num_tokens": 7, "loss": 2.5, "difference": 0.5}
    else:
        assert rounded["error"].endswith("ended with exit code 1")
        assert ("has nothing to be compared with: compiled" in rounded["error"]) == (fails == "compiled")
