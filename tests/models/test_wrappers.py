"""Multimodal checkpoints: the text model in them runs alone, in every layout of names, and nothing else is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WRAPPERS, Family, family, write_checkpoint
from family_comparison import difference_of
from safetensors.torch import load_file, save_file
from small_engines import SMALL
from transformers import AutoConfig

from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.wrappers import DEFAULTS, text_model
from compiled_engine.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
IDS = [7, 30, 2, 99, 41, 5, 11, 64, 3]


# The code of transformers for the text models alone.
FOREIGN = pytest.mark.shown_by("models/test_foreign_models.py::test_eager_logprobs_are_those_of_transformers")


def write(folder: Path, case: Family, *, prefix: str | None = None) -> Any:
    """Write the checkpoint as transformers does, or with that prefix before the text model's names."""
    oracle = write_checkpoint(folder, case)
    if prefix is not None:
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.replace("language_model.model.", prefix): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return oracle


@pytest.fixture(scope="module", params=WRAPPERS, ids=lambda case: case.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint's folder, and the whole model in transformers."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return folder, write(folder, request.param)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=64)
@pytest.mark.parametrize("implementation", ["auto", pytest.param("transformers", marks=FOREIGN)])
def test_logprobs_are_those_of_the_whole(checkpoint: tuple[Path, Any], implementation: str) -> None:
    options = {"mode": "eager", "device": "cpu", "model_impl": implementation}
    difference = difference_of(*checkpoint, options)
    assert difference.is_right(torch.float32), difference


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("prefix", [None, "model.language_model."], ids=["transformers 4", "transformers 5"])
def test_greedy_tokens_of_gemma_3_are_those_of_the_whole(
    prefix: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = write(tmp_path, family("gemma3"), prefix=prefix)
    expected = oracle.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False)[0, len(IDS) :].tolist()
    with caplog.at_level(logging.INFO), LLM(**SMALL | {"model": tmp_path, "tokenizer": None}) as llm:
        output = llm.generate([{"prompt_token_ids": IDS}], GREEDY)[0]
        reasons = dict(llm.config.reasons)
    assert list(output.outputs[0].token_ids) == expected
    assert "Gemma3ForConditionalGeneration" in reasons["model.wrapper"]
    assert "vision_tower (" in caplog.text
    assert "multi_modal_projector (2)" in caplog.text


def test_fields_that_text_config_leaves_out_are_those_of_transformers() -> None:
    for kind, fields in DEFAULTS.items():
        config = AutoConfig.for_model(kind)
        assert {name: getattr(config, name) for name in fields} == fields


def test_modules_that_are_not_quantised_have_the_text_models_names() -> None:
    ignored = ["model.language_model.layers.0.mlp", "model.visual.merger", "lm_head", "re:.*gate$"]
    stated: dict[str, Any] = {"quant_method": "fp8", "modules_to_not_convert": ignored}
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {"model_type": "qwen3_vl_text"}}
    fields, wrapper = text_model(JsonFields("config.json", whole | {"quantization_config": stated}))
    assert wrapper == "Qwen3VLForConditionalGeneration"
    named = fields.section("quantization_config").texts("modules_to_not_convert")
    assert named == ["model.layers.0.mlp", "model.visual.merger", "lm_head", "re:.*gate$"]
    stated["modules_to_not_convert"] = "lm_head"
    with pytest.raises(ValueError, match="modules_to_not_convert must be a list of strings, got 'lm_head'"):
        text_model(JsonFields("config.json", whole | {"quantization_config": stated}))


def test_a_multimodal_configuration_may_name_the_text_models_architecture() -> None:
    values = family("qwen3_5").config() | {"model_type": "qwen3_5"}
    read = [
        text_model(JsonFields("config.json", values | {"architectures": [name]}))
        for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    ]
    assert read[0][0].values == read[1][0].values
    assert [wrapper for _, wrapper in read] == ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"]


def test_a_text_model_of_another_type_is_refused(tmp_path: Path) -> None:
    write(tmp_path, family("llava"))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["model_type"] = "opt"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"text_config: model_type must be one of .*llama.* got 'opt'"):
        LLM(tmp_path, device="cpu", progress=False)
