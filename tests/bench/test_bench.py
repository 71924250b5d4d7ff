"""The benchmark commands: an ablation in real processes, wrong input, what a result holds. No time is asserted."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from quantised_checkpoints import LAYOUTS, write_quantised
from typer.testing import CliRunner

from compiled_engine.bench.ablation import COUNTS, Asked, Preparation, make_plan, measure
from compiled_engine.bench.large_tokenizer import SPECIAL_TOKENS, write_tokenizer
from compiled_engine.bench.plots import whole_name
from compiled_engine.bench.processes import ProcessError, run_worker
from compiled_engine.bench.start_up import torch_alone
from compiled_engine.bench.variants import QUANTISED_NOTE, Variant, chosen, variants
from compiled_engine.bench.worker_workloads import AblationWorkload
from compiled_engine.bench.workloads import request_lengths
from compiled_engine.cli.app import app
from compiled_engine.frontend.tokenizer import load_tokenizer
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

SMALL = ["--mode", "eager", "--max-model-len", "128", "--max-num-seqs", "8", "--num-blocks", "64"]
CONDITIONS = {"benchmark", "repeats", "command", "date", "machine", "model", "options", "versions"}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def result_of(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_figure(figure: dict[str, Any]) -> None:
    low, high = figure["spread"]
    assert 0 < low <= figure["median"] <= high


def test_a_quick_ablation_measures_every_part_and_draws_it(tmp_path: Path) -> None:
    result = result_of("ablation", "--quick", "--variant", "eager", "--output", str(tmp_path))
    assert [record["name"] for record in result["variants"]] == ["eager"]
    for record in result["variants"]:
        assert record["tpot_ms"].keys() == result["bound"]["tpot_ms"].keys() == {"1", "8"}
        for figure in (*record["tpot_ms"].values(), record["mixed_step_ms"], record["prefill_tokens_per_s"]):
            assert_figure(figure)
        assert_figure(record["start_up_s"])
        assert "warm up" in record["start_up_stages_s"]
        assert (record["kernels"], record["memory_bytes"]) == (None, None)
        assert record["repeats"] == 1
        assert [record[name] for name in COUNTS if name != "graph_fallbacks"] == [0, 0, 0]
    assert result.keys() == CONDITIONS | {"variants", "bound", "rates", "workload", "notes"}
    quick, graphs = result["notes"]
    assert "quick" in quick
    assert "CUDA" in graphs
    assert json.loads((tmp_path / "ablation.json").read_text()) == result
    plots = {"step_batch_1.png", "step_batch_8.png", "step_by_batch.png"}
    assert {path.name for path in tmp_path.iterdir()} == plots | {"ablation.json", "ablation.html"}


def test_variants_on_a_gpu_are_all_combinations_and_each_pass_left_out() -> None:
    found = variants("cuda", ["merge_linears", "silu_mul"])
    assert [variant.name for variant in found] == [
        "eager",
        "eager + full decode graphs",
        "eager + breakable",
        "compiled",
        "compiled + piecewise",
        "compiled + full and piecewise",
        "compiled + full",
        "compiled + full without merge_linears",
        "compiled + full without silu_mul",
    ]
    shared = {
        "seed": 1,
        "disable_passes": ["rms_norm"],
        "capture_sizes": [1],
        "capture_token_sizes": [2],
        "compile_workers": 0,
    }
    options = {variant.name: variant.engine_options(shared) for variant in found}
    assert options["eager"] == {"seed": 1, "mode": "eager"}
    decodes = {"seed": 1, "capture_sizes": [1], "mode": "eager", "graph_mode": "full_decode_only"}
    assert options["eager + full decode graphs"] == decodes
    breakable = {"seed": 1, "capture_token_sizes": [2], "mode": "eager", "graph_mode": "breakable"}
    assert options["eager + breakable"] == breakable
    no_decodes = {name: value for name, value in shared.items() if name != "capture_sizes"}
    no_graphs = {name: value for name, value in no_decodes.items() if name != "capture_token_sizes"}
    assert options["compiled"] == {**no_graphs, "mode": "compiled"}
    assert options["compiled + piecewise"] == {**no_decodes, "mode": "compiled", "graph_mode": "piecewise"}
    both = {**shared, "mode": "compiled", "graph_mode": "full_and_piecewise"}
    assert options["compiled + full and piecewise"] == both
    assert options["compiled + full"] == {**shared, "mode": "graphed"}
    without = options["compiled + full without silu_mul"]
    assert without == {**shared, "mode": "graphed", "disable_passes": ["rms_norm", "silu_mul"]}


def test_sequence_parallelism_goes_with_the_passes_that_it_needs() -> None:
    shared = {"tensor_parallel_size": 2, "sequence_parallel": True}
    found = variants("cpu", ["residual_rms_norm", "sequence_parallel", "silu_mul"])
    options = {variant.name: variant.engine_options(shared) for variant in found}
    asked = [name for name, chosen_ones in options.items() if chosen_ones.get("sequence_parallel")]
    assert asked == ["compiled", "compiled without silu_mul"]
    for chosen_ones in options.values():
        disabled = tuple(chosen_ones.get("disable_passes", ()))
        resolve(EngineOptions(device="cpu", **chosen_ones | {"disable_passes": disabled}))


@pytest.mark.parametrize(("device", "machine"), [("cpu", {}), ("cuda", {"gpu": "X"})])
def test_plots_mark_the_variant_with_all_parts(device: str, machine: dict[str, str]) -> None:
    whole = whole_name({"machine": machine})
    marked = [variant.options for variant in variants(device, ["silu_mul"]) if variant.name == whole]
    assert marked == [{"mode": "graphed" if machine else "compiled"}]


def test_on_a_cpu_there_are_no_variants_with_graphs() -> None:
    found = variants("cpu", ["silu_mul"])
    assert [variant.name for variant in found] == ["eager", "compiled", "compiled without silu_mul"]
    assert [variant.name for variant in chosen(found, ["compiled", "eager"])] == ["eager", "compiled"]


def test_quantised_linears_are_variants_if_they_are_named(tmp_path: Path) -> None:
    names = ("compiled", "compiled in fp8", "compiled in fp8_block", "compiled in int4")
    plan = make_plan({}, None, Asked(quick=True, variants=names))
    assert tuple(variant.name for variant in plan.variants) == names
    options = [variant.engine_options(plan.shared).get("quantization") for variant in plan.variants]
    assert options == [None, "fp8", "fp8_block", "int4"]
    assert QUANTISED_NOTE in plan.notes
    assert not any("quantization" in variant.options for variant in make_plan({}, None, Asked()).variants)
    make_checkpoint(tmp_path / "plain", "llama")
    write_quantised(tmp_path / "plain", tmp_path, LAYOUTS["fp8, block"], ["lm_head"])
    with pytest.raises(ValueError, match="variant is 'compiled in fp8'; allowed: eager, compiled, "):
        make_plan({"model": tmp_path}, None, Asked(quick=True, variants=names))


def test_each_pass_alone_is_all_the_others_left_out() -> None:
    found = variants("cpu", ["merge_linears", "rms_norm", "silu_mul"], ["silu_mul"], alone=True)
    disabled = {variant.name: variant.options.get("disable_passes") for variant in found}
    assert disabled == {
        "eager": None,
        "compiled": None,
        "compiled without silu_mul": ["silu_mul"],
        "compiled without all passes": ["merge_linears", "rms_norm", "silu_mul"],
        "compiled without all passes but silu_mul": ["merge_linears", "rms_norm"],
    }
    plan = make_plan({}, None, Asked(quick=True, alone=True))
    enabled = plan.config.compile.passes
    only = dict(plan.variants[-1].options)["disable_passes"]
    assert [name for name in enabled if name not in only] == ["merge_linears"]


def a_result(start: float) -> dict[str, Any]:
    return {
        "wall_s": start,
        "start_up": [
            {"name": "compile", "start_s": 0.0, "seconds": start, "parent": None},
            {"name": "trace", "start_s": 0.0, "seconds": start / 2, "parent": "compile"},
        ],
        "tpot_ms": {"1": start},
        "step_ms": {"1": [start, start + 1]},
        "mixed_step_ms": start,
        "prefill_tokens_per_s": 10.0,
        "kernels": None,
        "image_ms": None,
        "memory_bytes": {"kv_cache": 5},
        **dict.fromkeys(COUNTS, 0),
    }


def test_repeats_are_interleaved_after_a_preparation_of_what_compiles() -> None:
    calls: list[tuple[str, bool]] = []

    def fake(options: Any, workload: Any) -> dict[str, Any]:
        calls.append((options["mode"], workload is None))
        assert (options["num_blocks"] == 2) == (workload is None)
        return a_result(float(len(calls)))

    found = variants("cpu", [])
    records = measure(
        found, {"num_blocks": 9}, AblationWorkload(), 3, Preparation(1, 2, eager=False), SilentProgress(), fake
    )
    rounds = [("eager", False), ("compiled", False)] * 3
    assert calls == [("compiled", True), *rounds]
    assert records[0]["tpot_ms"] == {"1": {"median": 4.0, "spread": [2.0, 6.0]}}
    assert records[0]["step_ms"] == {"1": {"median": 4.5, "spread": [2.0, 7.0]}}
    assert records[1]["start_up_stages_s"] == {"compile": 5.0}
    assert records[1]["memory_bytes"] == {"kv_cache": {"median": 5, "spread": [5, 5]}}
    assert records[1]["kernels"] is None


def test_a_repeat_that_fails_costs_none_before_it() -> None:
    calls = []

    def fake(options: Any, workload: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 2:
            raise ProcessError("ended with exit code 1\nboom")
        return a_result(1.0)

    (found,) = chosen(variants("cpu", []), ["eager"])
    (record,) = measure([found], {}, AblationWorkload(), 4, Preparation(1, 2, eager=False), SilentProgress(), fake)
    assert (record["repeats"], len(calls)) == (2, 3)
    assert record["error"].endswith("boom")


def test_an_interrupt_costs_no_repeat_before_it() -> None:
    calls = []

    def fake(options: Any, workload: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == interrupted_at:
            raise KeyboardInterrupt
        return a_result(1.0)

    found, preparation = variants("cpu", ["silu_mul"]), Preparation(1, 2, eager=True)
    interrupted_at = 8  # after 3 preparations, a round of 3 and a variant
    records = measure(found, {}, AblationWorkload(), 2, preparation, SilentProgress(), fake)
    assert [record["repeats"] for record in records] == [2, 1, 1]
    assert [record.get("error") for record in records] == [None, *["was interrupted after 1 of 2 repeats"] * 2]
    calls.clear()
    interrupted_at = 4
    with pytest.raises(KeyboardInterrupt):
        measure(found, {}, AblationWorkload(), 2, preparation, SilentProgress(), fake)


def test_a_variant_that_cannot_be_is_refused_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = [Variant("eager", {"mode": "eager", "graph_mode": "piecewise"})]
    monkeypatch.setattr("compiled_engine.bench.ablation.variants", lambda *about: impossible)
    with pytest.raises(ValueError, match="variant 'eager' cannot be measured: graph_mode is 'piecewise'"):
        make_plan({}, None, Asked(quick=True))


def test_the_command_names_a_variant_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Any, workload: Any, limit_s: float = 0) -> dict[str, Any]:
        raise ProcessError("ended with exit code 1\nboom")

    monkeypatch.setattr("compiled_engine.bench.ablation.measure.__defaults__", (fail,))
    result = run("ablation", "--quick", "--variant", "eager", "--json")
    assert result.exit_code == 1
    assert "'eager'" in result.stderr
    assert "boom" in result.stderr
    assert json.loads(result.stdout)["variants"][0]["error"].endswith("boom")


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(ProcessError, match=r"(?s)exit code 1.*max_num_seqs is 0"):
        run_worker({"mode": "eager", "max_num_seqs": 0}, None)


def test_a_worker_killed_in_the_middle_of_a_line_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("import os; print('{\"first_to', flush=True); os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("compiled_engine.bench.processes.WORKER", "half")
    with pytest.raises(ProcessError, match="exit code 9"):
        run_worker({}, None)


def test_a_worker_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ProcessError, match="took longer than"):
        run_worker({"mode": "eager"}, None, limit_s=0.1)


def test_a_plan_bounds_the_kv_cache_and_fits_the_model() -> None:
    plan = make_plan({"max_model_len": 512}, None, Asked(batch_sizes=(2,)))
    assert plan.workload.prefill_len == 511
    assert plan.shared["max_num_seqs"] == 36
    assert plan.shared["num_blocks"] == plan.workload.num_blocks(plan.config.cache.block_size)
    assert [variant.name for variant in plan.variants][:3] == ["eager", "compiled", "compiled + recorded"]
    assert plan.variants[-1].name == "compiled in a worker process"
    assert len(plan.variants) == 4 + len(plan.config.compile.passes)
    ranks = make_plan({"max_model_len": 512, "tensor_parallel_size": 2}, None, Asked(batch_sizes=(2,)))
    names = [variant.name for variant in ranks.variants]
    assert names[-2:] == ["compiled without gated_linear", "compiled with sequence parallelism"]
    assert "compiled without all_reduce_residual_rms_norm" in names
    quick = make_plan({}, None, Asked(quick=True))
    assert [variant.name for variant in quick.variants] == [
        "eager",
        "compiled",
        "compiled + recorded",
        "compiled without merge_linears",
    ]


def test_workload_t_is_what_other_engines_were_measured_with() -> None:
    prompts, output_lens = request_lengths(256, (100, 1024), (100, 1024), seed=0)
    assert (sum(map(len, prompts)), sum(output_lens)) == (142_827, 133_966)


def test_startup_shows_its_stages() -> None:
    result = result_of("startup", "--repeats", "1", *SMALL)
    assert result.keys() == CONDITIONS | {"results", "torch_alone"}
    assert_figure(result["torch_alone"])
    for kind in ("cold", "warm"):
        record = result["results"][kind]
        assert_figure(record["seconds"])
        assert record["cache"] == "off"
        parents = {span["name"]: span["parent"] for span in record["start_up"]}
        assert {"before the engine", "configuration", "tokenizer", "load weights"} <= parents.keys()
        for part in ("interpreter", "import the engine"):
            assert parents[part] == "before the engine"
        assert parents["import torch"] is None


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(ProcessError, match=r"(?s)ended with exit code 1\n.*XPU"):
        torch_alone(torch.device("xpu"))


def test_a_shape_starts_with_a_tokenizer_as_large_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabularies = []

    def fake(options: Any, workload: Any) -> dict[str, Any]:
        made = json.loads(Path(options["model"], "tokenizer.json").read_text())
        vocabularies.append(len(made["model"]["vocab"]) + len(made["added_tokens"]))
        return {"wall_s": 1.0, "cache": "miss", "start_up": []}

    monkeypatch.setattr("compiled_engine.bench.start_up.run_worker", fake)
    result_of("startup", "--shape", "qwen3-0.6b", "--device", "cpu", "--repeats", "1")
    assert vocabularies == [151_646, 151_646]


@pytest.fixture(scope="module")
def made_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, num_tokens=2000)
    return load_tokenizer(folder)


@given(text=st.text())
def test_the_made_tokenizer_reads_back_what_it_has_written(made_tokenizer: Any, text: str) -> None:
    assert made_tokenizer.decode(made_tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_the_made_tokenizer_merges_and_is_like_those_of_chat_models(made_tokenizer: Any, tmp_path: Path) -> None:
    assert made_tokenizer.knows(1999 + len(SPECIAL_TOKENS))
    assert not made_tokenizer.knows(2000 + len(SPECIAL_TOKENS))
    longest = max((token for token in made_tokenizer.hf.get_vocab() if token.isascii() and token.isalpha()), key=len)
    assert len(made_tokenizer.encode(longest)) < len(longest)
    assert made_tokenizer.hf.eos_token_id == 2002
    chat = made_tokenizer.hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    write_tokenizer(tmp_path, num_tokens=2000)
    assert load_tokenizer(tmp_path).hf.get_vocab() == made_tokenizer.hf.get_vocab()


def test_the_engine_is_compared_with_the_fastest_way_of_transformers() -> None:
    ways = ["--way", "generate", "--way", "static", "--way", "continuous"]
    asked = ["--requests", "2", "--prompt-len", "5", "--output-len", "3", "--repeats", "1", "--mode", "eager"]
    result = result_of("transformers", *asked, *ways)
    assert result.keys() == CONDITIONS | {"results", "rates", "workload"}
    for name, continuous in (("one", False), ("many", True)):
        found = result["results"][name]
        assert ("continuous batching" in {record["way"] for record in found["transformers"]}) == continuous
        rates = [record["tokens_per_s"]["median"] for record in found["transformers"]]
        assert found["fastest"]["tokens_per_s"]["median"] == max(rates)
        assert found["ratio"] == found["engine"]["median"] / max(rates)
        assert_figure(found["engine"])
        assert found["bandwidth_share"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step", "--batch", "65"], "max_num_seqs is 64; allowed: at least 65"),
        (["step", "--steps", "2000"], "max_model_len is 2048; allowed: at least 4144"),
        (["startup", "--no-cache"], "compile_cache is 'False'; allowed: none"),
        (["ablation", "--mode", "eager"], "mode is 'eager'; allowed: none"),
        (["ablation", "--no-cache"], "compile_cache is False; allowed: True"),
        (["ablation", "--variant", "nope"], "variant is 'nope'; allowed: eager, compiled"),
        (["ablation", "--batch", "8", "--batch", "8"], "batch is [8, 8]; allowed: each size once"),
        (["ablation", "--batch", "0"], "--batch"),
        (["ablation", "--num-blocks", "3"], "num_blocks is 3; allowed: at least 1025"),
        (["ablation", "--max-num-seqs", "2"], "max_num_seqs is 2; allowed: at least 36"),
        (["ablation", "--max-model-len", "99"], "max_model_len is 99; allowed: at least 257"),
        (["ablation", "--max-num-batched-tokens", "64"], "max_num_batched_tokens is 64; allowed: at least 288"),
        (["ablation", "--shape", "tiny"], "shape is 'tiny'; allowed: qwen2.5-0.5b, qwen3-0.6b"),
        (["ablation", "--shape", "qwen3-0.6b", "--model", "x"], "allowed: one of the two"),
        (["ablation", "--output", __file__], "a file; allowed: a folder"),
        (["plot", "missing.json", "--output", "x"], "results is 'missing.json'; allowed: a JSON file"),
        (["plot", __file__, "--output", "x"], "which is no JSON"),
        (["transformers", "--shape", "tiny"], "shape is 'tiny'; allowed: qwen2.5-0.5b, qwen3-0.6b, qwen3-8b"),
        (["transformers", "--way", "beam"], "way is 'beam'; allowed: generate, static, compiled, continuous"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_wrong_input_is_named_before_work_starts(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(EngineOptions())  # asks the C++ compiler for its version, once
    monkeypatch.setattr("subprocess.Popen", None)
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_plots_without_matplotlib_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("ablation", "--quick", "--output", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "matplotlib" in result.stderr
    assert not (tmp_path / "new").exists()
