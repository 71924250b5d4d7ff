"""hf_overrides: values in the place of those in config.json mean what a changed config.json means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_model_config import read, write
from transformers import AutoConfig

from compiled_engine.graphs.cache.key import graph_config
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.config_overrides import read_overrides
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NEW, OLD = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, {"rope_theta": 7e5}
STATED_YARN = {"rope_scaling": {**YARN, "factor": 2.0}, "rope_theta": 7e5}


def stated(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    return values


@pytest.mark.parametrize("fields", [NEW, OLD, STATED_YARN])
@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"rope_parameters": YARN}, {"rope_parameters": {**YARN, "rope_theta": 7e5}, "rope_scaling": None}),
        ({"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 7e5}, "rope_scaling": None}),
        (
            {"rope_scaling": {**YARN, "rope_theta": 3e4}},
            {"rope_parameters": {**YARN, "rope_theta": 3e4}, "rope_scaling": None},
        ),
        (
            {"rope_scaling": YARN, "rope_theta": 3e4},
            {"rope_parameters": {**YARN, "rope_theta": 3e4}, "rope_scaling": None},
        ),
        (
            {"rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_scaling": None},
        ),
        ({"max_position_embeddings": 64, "num_hidden_layers": 2},) * 2,
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},) * 2,
        ({"tie_word_embeddings": True, "rms_norm_eps": 0.5},) * 2,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",
        pytest.param("PhiForCausalLM", marks=pytest.mark.product(one_in=1000, each=("given",))),
    ],
)
def test_an_override_is_a_changed_file(fields: Any, given: Any, same: Any, architecture: str, tmp_path: Path) -> None:
    """Holds for textbook models and for those of transformers."""
    kind = {"PhiForCausalLM": "phi"}.get(architecture, "qwen3")
    fields = {**fields, "model_type": kind}
    plain = write(tmp_path / "plain", architecture, **fields)
    changed = write(tmp_path / "changed", architecture, **(stated(plain) | same))
    found, _ = read(plain, overrides=given)
    expected, _ = read(changed)
    if expected.transformers is not None:
        assert found.transformers is not None
        of_file, of_override = (
            AutoConfig.for_model(**json.loads(each.transformers.config)) for each in (expected, found)
        )
        assert of_override.to_dict() == of_file.to_dict()
        expected = replace(expected, transformers=found.transformers)
    assert replace(found, path=changed, overrides="") == expected


@pytest.mark.parametrize("fields", [NEW, STATED_YARN])
def test_another_theta_reaches_the_part_that_has_it(fields: Any, tmp_path: Path) -> None:
    found, reasons = read(write(tmp_path, "Qwen3ForCausalLM", **fields), overrides={"rope_theta": 3e4})
    assert found.rope.theta == 3e4
    assert reasons["model.overrides"] == "hf_overrides: rope_theta"


def test_parts_are_overridden_value_by_value(tmp_path: Path) -> None:
    of_text = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e5},
    }
    write(tmp_path, "LlavaForConditionalGeneration", model_type="llava", text_config=stated(write(tmp_path)) | of_text)
    overrides = {"text_config": {"num_hidden_layers": 2, "rope_parameters": YARN}}
    found, _ = read(tmp_path, overrides=overrides)
    assert (found.num_layers, found.hidden_size, found.rope.kind, found.rope.theta) == (2, 256, "yarn", 7e5)
    assert found.max_model_len == 2048


def test_errors_name_the_overrides(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(
        ValueError, match=r"config.json with hf_overrides: hidden_size must be a whole number .* got 'x'"
    ):
        read(tmp_path, overrides={"hidden_size": "x"})
    with pytest.raises(ValueError, match=r"allowed: a dict of values of config\.json as JSON"):
        read_overrides("{x")
    with pytest.raises(TypeError, match="allowed: a dict of values"):
        read_overrides("[]")
    with pytest.raises(TypeError, match="allowed: values that JSON has"):
        read_overrides({"x": object()})
    with pytest.raises(TypeError, match="a dict of values"):
        EngineOptions(hf_overrides=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"rope_scaling": '{"rope_type": "yarn"}', "rope_theta": "5"},
         {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 5}),
        ({"hf_overrides": '{"a": 1}', "rope_theta": 5}, {"a": 1, "rope_theta": 5}),
        ({"rope_theta": 5, "json_model_override_args": {"a": 1}}, {"a": 1, "rope_theta": 5}),
        ({"hf_overrides": {}}, None),
    ],
)  # fmt: skip
def test_words_of_other_engines_are_overrides(words: dict[str, Any], expected: Any) -> None:
    assert make_options(words).hf_overrides == expected


@pytest.mark.parametrize("words", [{"hf_overrides": "{x", "rope_theta": 5}, {"rope_theta": 5, "hf_overrides": "[]"}])
def test_the_word_that_is_wrong_is_named(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^hf_overrides is '{words['hf_overrides']}'".replace("[", r"\[")):
        make_options(words)


def test_a_reranker_is_made_of_a_decoder(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM")
    (tmp_path / "vocab.json").write_text(json.dumps({"no": 3, "yes": 5}))
    classes = {"architectures": ["Qwen3ForSequenceClassification"]}
    two, _ = read(tmp_path, overrides={**classes, "classifier_from_token": ["no", "yes"]})
    assert two.pooling is not None
    assert two.architecture == "Qwen3ForCausalLM"
    assert [head.tokens for head in two.pooling.head] == [(3, 5)]
    one, _ = read(tmp_path, overrides={**classes, "classifier_from_token": ["yes"]})
    assert one.pooling is not None
    assert [head.tokens for head in one.pooling.head] == [(5,)]
    with pytest.raises(ValueError, match="classifier_from_token must be the token that affirms, or two"):
        read(tmp_path, overrides={**classes, "classifier_from_token": ["a", "b", "c"]})


def test_the_compile_cache_sees_what_overrides_change() -> None:
    """A changed constant of the graph makes another entry, a changed input does not, as with a changed file."""

    def factors(**overrides: Any) -> dict[str, Any]:
        return graph_config(resolve(EngineOptions(device="cpu", hf_overrides=overrides)))

    plain = factors()
    assert factors(rope_theta=5.0) == plain
    fewer = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    for changed in ({"rms_norm_eps": 0.5}, fewer, {"rope_parameters": YARN}):
        assert factors(**changed) != plain


def test_an_engine_runs_with_overrides() -> None:
    """Another rotary embedding gives other tokens, and generation ends at the overriding end-of-sequence token."""
    options: dict[str, Any] = {
        "mode": "eager",
        "device": "cpu",
        "progress": False,
        "max_model_len": 64,
        "num_blocks": 64,
    }
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(**options) as llm:
        whole = llm.generate("def add(a, b):", params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(**options, hf_overrides={"eos_token_id": whole[3]}) as llm:
        (ended,) = llm.generate("def add(a, b):", params, use_tqdm=False)[0].outputs
        assert (ended.token_ids, ended.finish_reason) == (whole[: whole.index(whole[3]) + 1], "stop")
        assert llm.config.model.overrides == json.dumps({"eos_token_id": whole[3]})
    with LLM(**options, hf_overrides='{"rope_theta": 100.0}') as llm:
        assert llm.config.model.rope.theta == 100.0
        assert llm.generate("def add(a, b):", params, use_tqdm=False)[0].outputs[0].token_ids != whole
