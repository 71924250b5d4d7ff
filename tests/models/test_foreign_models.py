"""Models whose code is that of transformers: right in every mode, few layers traced, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from families import IN_TESTS, family, write_checkpoint
from family_comparison import (
    difference_after_passes,
    difference_of,
    fused_model,
)
from pass_cases import CPU
from small_engines import PROMPTS, SMALL
from transformers import AutoModelForCausalLM, OlmoConfig, OlmoForCausalLM

from compiled_engine.config import ModelConfig
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.foreign import compat, description
from compiled_engine.models.foreign.description import description_file
from compiled_engine.models.foreign.transformers_model import build_foreign_model
from compiled_engine.other_engines.translate import make_options
from compiled_engine.passes.framework.graph_text import graph_text
from compiled_engine.passes.framework.manager import PassReport
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

# `make test-all` runs every case.
pytestmark = pytest.mark.product(one_in=48)

TEXTBOOK_PASSES = ("merge_linears", "residual_rms_norm", "rms_norm", "rope_angles", "rope_kv_write", "silu_mul")


def test_another_version_of_transformers_has_descriptions_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = description_file("{}", torch.float32, tmp_path)
    monkeypatch.setattr(description, "transformers_version", lambda: "5.99.0")
    assert description_file("{}", torch.float32, tmp_path) != before
    monkeypatch.undo()
    assert description_file("{}", torch.float32, tmp_path) == before


@pytest.fixture(scope="module", params=IN_TESTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A family's folder, and its model in transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, family(request.param))


@pytest.mark.usefixtures("one_thread")
def test_eager_logprobs_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    difference = difference_of(*checkpoint, {"mode": "eager", "device": "cpu"})
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


@pytest.mark.usefixtures("one_thread")
def test_logprobs_after_all_passes_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    model = fused_model(folder, {"device": "cpu"}, verify=True)
    difference = difference_after_passes(model, oracle)
    assert difference.is_right(torch.float32), difference
    reports = {report.name: report for report in model.reports}
    for name in ("foreign_attention", "normalise_layout", "fold_parameters", "merge_linears"):
        assert reports[name].matches >= reports[name].contract
    assert reports["foreign_attention"].matches == model.config.model.num_layers


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    ["electra", "gptj", "ctrl"],
    ids=["linears in a row", "strides that are a maximum", "assigned buffers, scaled by numpy"],
)
def test_graphs_of_unusual_code_are_right_after_all_passes(name: str, tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, family(name))
    assert difference_after_passes(fused_model(tmp_path, {"device": "cpu"}), oracle).is_right(torch.float32)


def test_transformers_code_of_a_textbook_model_gives_the_textbooks_pieces(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    textbook, foreign = (
        fused_model(tmp_path, {"device": "cpu", "model_impl": impl}) for impl in ("textbook", "transformers")
    )

    def matches(reports: tuple[PassReport, ...]) -> dict[str, tuple[int, int]]:
        return {report.name: (report.matches, report.contract) for report in reports if report.name in TEXTBOOK_PASSES}

    assert matches(foreign.reports) == matches(textbook.reports)
    assert all(count == contract > 0 for count, contract in matches(foreign.reports).values())


def traced_text(folder: Path, *, of_all_layers: bool) -> tuple[list[str], str]:
    options = {"model": folder, "mode": "compiled", "device": "cpu", "model_impl": "transformers"}
    config = resolve(make_options(options))
    model = without_storage(build_model(config.model), CPU)
    if of_all_layers:
        model.layers_path = ""
    traced = trace(model, forward_signature(config))
    lines = [line.partition(": ")[2] for line in graph_text(traced.module.graph) if " = input " not in line]
    return [line.split("(")[0] for line in lines], traced.dynamo_graph


@pytest.mark.shown_by("graphs/test_repeated_layers.py::test_few_layers_of_transformers_code_are_traced")
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_few_layers_are_traced_and_the_graph_is_that_of_all(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, architecture, num_hidden_layers=4)
    few, graph = traced_text(tmp_path, of_all_layers=False)
    every, whole = traced_text(tmp_path, of_all_layers=True)
    assert few == every
    assert "the layers [0, 1, 3]" in graph
    assert "the layers" not in whole


def test_the_bundled_model_gives_the_textbooks_tokens_and_later_starts_import_nothing_of_transformers() -> None:
    params = SamplingParams(temperature=0, max_tokens=8)

    def tokens(**options: Any) -> list[list[int]]:
        with LLM(**SMALL | options) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]

    expected = tokens()
    assert tokens(model_impl="transformers") == expected
    cached = {"mode": "compiled", "compile_ranges": (), "model_impl": "transformers"}
    assert tokens(**cached) == expected
    program = (
        "import json, sys\n"
        "from compiled_engine import LLM, SamplingParams\n"
        "options, prompts = json.loads(sys.argv[1])\n"
        "with LLM(**options) as llm:\n"
        "    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))\n"
        "    traces = llm.metrics()['traces']\n"
        "imported = any(name.split('.')[0] == 'transformers' for name in sys.modules)\n"
        "print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], traces, imported]))\n"
    )
    command = [sys.executable, "-c", program, json.dumps([SMALL | cached, PROMPTS])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == [expected, 0, False]


def write_config(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def read(folder: Path, model_impl: str = "auto") -> ModelConfig:
    options = {"dtype": "float32", "max_model_len": None, "load_format": "dummy", "seed": 0, "device_type": "cpu"}
    return read_model_config(folder, **options, model_impl=model_impl)[0]


SMALL_DEEPSEEK = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "first_k_dense_replace": 2,
    "vocab_size": 64,
}


def test_angles_that_depend_on_the_length_in_some_layers_alone_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ropes = {"full_attention": dynamic, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    folder = write_config(tmp_path, **names, num_hidden_layers=2, hidden_size=32, rope_parameters=ropes)
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM cannot .* length .*'dynamic'.* in some layers"):
        read(folder, "transformers")


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"architectures": ["MyForCausalLM"], "model_type": "my", "auto_map": {"AutoModelForCausalLM": "my.My"}},
            ("MyForCausalLM", "auto_map", "never executed"),
        ),
        (
            {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"} | SMALL_DEEPSEEK,
            ("DeepseekV32ForCausalLM", "sparse attention by an index"),
        ),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32},
            ("MambaForCausalLM",),
        ),
        (
            {"architectures": ["CpmAntForCausalLM"], "model_type": "cpmant", "num_hidden_layers": 2, "hidden_size": 32},
            ("CpmAntForCausalLM", "AttentionInterface"),
        ),
        (
            {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "hidden_size": "wide"},
            ("OlmoForCausalLM", "hidden_size", "'wide'"),
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(values: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"For\w+LM") as error:
        read(write_config(tmp_path, **values))
    for part in ("config.json", *parts):
        assert part in str(error.value)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("found", ["5.16.1", "5.25.0", "6.0"])
def test_other_versions_of_transformers_are_refused(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(compat, "version", lambda package: found)
    with pytest.raises(ValueError, match=f"needs transformers >=5.17,<5.25, found {found}"):
        read(tmp_path, "transformers")


class OwnHead(OlmoForCausalLM):
    """A model whose head runs a layer once more."""

    def forward(self, **keywords: Any) -> Any:
        output = super().forward(**keywords)
        if hasattr(self, "step") and self.step.hands_on:
            self.model.layers[0](keywords["inputs_embeds"], position_embeddings=None)
        return output


def test_a_head_that_runs_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, OlmoConfig, OwnHead)
    config = OlmoConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    config.architectures = ["OwnHead"]
    with pytest.raises(ValueError, match=r"OwnHead cannot be run .*: its head calls the decoder in an unsupported way"):
        build_foreign_model(config.to_json_string(use_diff=False), torch.float32)


def test_the_key_has_the_whole_configuration_and_the_version_of_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")

    def factors(model_impl: str) -> dict[str, Any]:
        return cache_factors(resolve(make_options({"model": tmp_path, "device": "cpu", "model_impl": model_impl})))

    textbook, foreign = factors("textbook"), factors("transformers")
    assert foreign["config"]["model.transformers.version"] == version("transformers")
    assert json.loads(foreign["config"]["model.transformers.config"]) == json.loads(
        (tmp_path / "config.json").read_text()
    )
    assert not any(name.startswith("model.transformers") for name in textbook["config"])
    assert foreign["source"].keys() - textbook["source"].keys()
    make_checkpoint(tmp_path, "llama", attention_dropout=0.5)
    assert factors("transformers") != foreign
    assert factors("textbook") == textbook


def test_the_textbook_is_taken_where_there_is_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    assert read(tmp_path).transformers is None
    assert read(tmp_path, "textbook") == read(tmp_path)
    foreign = read(tmp_path, "transformers")
    assert foreign.transformers is not None
    shape = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "sliding_windows")
    assert [getattr(foreign, name) for name in shape] == [getattr(read(tmp_path), name) for name in shape]
