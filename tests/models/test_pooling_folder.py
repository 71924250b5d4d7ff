"""The statements of a folder that pools, read without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.pooling_folder import (
    PoolingOptions,
    headless_name,
    pooling_tensors,
    read_pooling,
    stated_length,
)
from compiled_engine.pooling import CLASSIFY, LAST, NONE, NORMALISE, SIGMOID, SOFTMAX, Dense, PoolerConfig, Pooling

HIDDEN = 8


def read(
    path: Path, architecture: str = "Qwen3Model", override: dict[str, Any] | None = None, **config: Any
) -> Pooling:
    fields = JsonFields("config.json", {"architectures": [architecture], **config})
    asked = PoolingOptions(override=PoolerConfig.of(override or {}))
    return read_pooling(fields, path, asked, HIDDEN, {}, causal=True)


@pytest.mark.parametrize(
    ("count", "problem", "activation"),
    [
        (1, None, SIGMOID),
        (1, "single_label_classification", SOFTMAX),
        (2, None, SOFTMAX),
        (2, "single_label_classification", SOFTMAX),
        (1, "multi_label_classification", SIGMOID),
    ],
)
def test_a_stated_problem_counts_more_than_the_number_of_labels(
    count: int, problem: str | None, activation: str, tmp_path: Path
) -> None:
    labels = {str(i): f"L{i}" for i in range(count)}
    stated = {} if problem is None else {"problem_type": problem}
    pooling = read(tmp_path, "Qwen3ForSequenceClassification", id2label=labels, **stated)
    assert (pooling.activation, pooling.labels) == (activation, tuple(labels.values()))


@pytest.mark.parametrize("convert", ["auto", "none", "classify", "embed"])
def test_a_classifier_keeps_its_head_unless_it_embeds(convert: str) -> None:
    classifier = "BertForSequenceClassification"
    assert headless_name(classifier, convert) == ("BertModel" if convert == "embed" else classifier)
    for architecture in ("BertModel", "BertForMaskedLM", "BertForPreTraining"):
        assert headless_name(architecture, convert) == "BertModel"


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    "stated",
    [{"sentence_transformers": {"activation_fn": IDENTITY}}, {"sbert_ce_default_activation_function": IDENTITY}],
    ids=["since version 4", "before"],
)
def test_a_cross_encoder_states_its_activation_in_one_of_two_fields(stated: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, "Qwen3ForSequenceClassification", num_labels=1, **stated).activation == NONE


def test_a_cross_encoder_may_state_its_activation_beside_the_configuration(tmp_path: Path) -> None:
    """A file of sentence-transformers counts more than config.json; what is no module of torch counts nowhere."""
    file = tmp_path / "config_sentence_transformers.json"
    for activation, expected in ((IDENTITY, NONE), ("torch.nn.modules.activation.Sigmoid", SIGMOID), ("own.F", NONE)):
        file.write_text(json.dumps({"model_type": "CrossEncoder", "activation_fn": activation}))
        older = {"sentence_transformers": {"activation_fn": IDENTITY}}
        assert read(tmp_path, "Qwen3ForSequenceClassification", num_labels=1, **older).activation == expected
    file.write_text(json.dumps({"activation_fn": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(ValueError, match="activation_fn must be one of Identity, Sigmoid, Softmax, got 'torch"):
        read(tmp_path, "Qwen3ForSequenceClassification", num_labels=1)


@pytest.mark.parametrize("softmax", [True, False])
def test_softmax_is_for_classifiers(softmax: bool, tmp_path: Path) -> None:
    assert read(tmp_path, override={"softmax": softmax}).activation == NORMALISE
    classifier = read(tmp_path, "Qwen3ForSequenceClassification", {"softmax": softmax}, num_labels=3)
    assert classifier.activation == (SOFTMAX if softmax else SIGMOID)
    raw = {"softmax": softmax, "use_activation": False}
    quiet = read(tmp_path, "Qwen3ForSequenceClassification", raw, num_labels=3)
    assert quiet == replace(classifier, activates=False)


def write_dense(path: Path, **config: Any) -> None:
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Dense", "type": "sentence_transformers.models.Dense"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Dense").mkdir(exist_ok=True)
    (path / "1_Dense" / "config.json").write_text(json.dumps({"in_features": HIDDEN, "out_features": 3, **config}))


def test_a_linear_has_the_defaults_of_sentence_transformers(tmp_path: Path) -> None:
    """The defaults are a bias and tanh."""
    write_dense(tmp_path)
    (dense,) = read(tmp_path).head
    assert (dense.source, dense.in_size, dense.out_size, dense.bias, dense.activation) == (
        "1_Dense",
        HIDDEN,
        3,
        True,
        "Tanh",
    )
    assert hasattr(torch.nn, dense.activation)
    write_dense(tmp_path, in_features=9)
    with pytest.raises(ValueError, match="in_features must be 8, as many as come before"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["bert", "distilbert", "xlnet"])
def test_a_transformer_states_its_length_and_lower_case(name: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "Transformer"}]))
    assert (stated_length(tmp_path), read(tmp_path).lower_case) == (None, False)
    file = tmp_path / f"sentence_{name}_config.json"
    file.write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    assert (stated_length(tmp_path), read(tmp_path).lower_case) == ((20, f"max_seq_length of {file.name}"), True)


@pytest.mark.parametrize(
    ("length", "found"), [(20, 20), (1e30, int(1e30)), (None, None), ("long", None), (math.inf, None)]
)
def test_the_length_may_be_the_tokenizers(length: Any, found: int | None, tmp_path: Path) -> None:
    """sentence-transformers reads it unless the transformer module has a length; in other folders it has no such
    meaning."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    assert stated_length(tmp_path) is None
    (tmp_path / "modules.json").write_text("[]")
    assert stated_length(tmp_path) == (found and (found, "model_max_length of tokenizer_config.json"))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30}))
    assert stated_length(tmp_path) == (30, "max_seq_length of sentence_bert_config.json")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("Normalize", "Dense"), "type must be before Normalize, got 'sentence_transformers.models.Dense'"),
        (("Pooling", "Normalize", "Dense"), "type must be before Normalize"),
        (("Dense", "Pooling"), "type must be before Dense, got 'sentence_transformers.models.Pooling'"),
        (("Normalize", "Pooling"), "type must be before Normalize"),
    ],
    ids=" ".join,
)
def test_modules_in_another_order_are_refused(kinds: Sequence[str], message: str, tmp_path: Path) -> None:
    write_dense(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    modules = [{"path": f"1_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "Transformer"}, *modules]))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_residual": True}, "use_residual must be false, got True"),
        ({"module_output_name": "scores"}, "module_output_name must be one of sentence_embedding, token_embeddings"),
    ],
)
def test_linears_of_another_kind_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_dense(tmp_path, module_input_name="token_embeddings", use_residual=False)  # nothing pools
    assert len(read(tmp_path).head) == 1
    write_dense(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("false", "stated", "activation"),
    [
        (None, None, SIGMOID),
        (None, "activation.Sigmoid", SIGMOID),
        (None, "linear.Identity", NONE),
        (3, None, SOFTMAX),
        (3, "activation.Sigmoid", SOFTMAX),
        (3, "linear.Identity", NONE),
    ],
)
def test_the_logits_of_tokens_that_judge_are_activated_as_stated(
    false: int | None, stated: str | None, activation: str, tmp_path: Path
) -> None:
    """The sigmoid of a difference of two logits is their softmax."""
    modules = [{"path": "", "type": "Transformer"}, {"path": "1", "type": "LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"true_token_id": 1, "false_token_id": false}))
    if stated is not None:
        values = {"activation_fn": f"torch.nn.modules.{stated}"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(values))
    assert read(tmp_path, "Qwen3ForCausalLM").activation == activation


def test_the_template_of_a_pair_is_that_of_its_architecture_alone(tmp_path: Path) -> None:
    """Other models get both texts as the tokenizer joins them; models whose chat template writes pairs are refused."""
    modules = [{"path": "", "type": "Transformer"}, {"path": "1", "type": "LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"true_token_id": 1, "false_token_id": 3}))
    architectures = ("Qwen3ForCausalLM", "Qwen2ForCausalLM")
    assert [bool(read(tmp_path, each).template) for each in architectures] == [True, False]
    modalities = {"message": {"method": "forward", "method_output_name": "logits", "format": "flat"}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": modalities}))
    assert read(tmp_path, "Qwen3ForCausalLM").template
    with pytest.raises(ValueError, match="message must be absent, as chat templates write no pairs, unless the archit"):
        read(tmp_path, "Qwen2ForCausalLM")


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_judge_are_rows_of_the_output_projection(tied: bool) -> None:
    """A tied checkpoint may hold one that is not read."""
    head = Dense("", HIDDEN, 2, tokens=(3, 1))
    pooling = Pooling(CLASSIFY, LAST, (head,), SOFTMAX)
    config = replace(tiny_config().model, tie_word_embeddings=tied, pooling=pooling)
    embedding, output = torch.randn(2, 5, HIDDEN)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    found = pooling_tensors(tensors, {"model.embed_tokens.weight"}, config)
    assert found.keys() == {"model.embed_tokens.weight", "pooler.linears.0.weight"}
    assert torch.equal(found["pooler.linears.0.weight"], (embedding if tied else output)[[3, 1]])
