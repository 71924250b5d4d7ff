"""Encoders: vectors, classes and scores equal to those of transformers and sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_folders import FAMILIES, HIDDEN, make_encoder, make_encoder_classifier
from pooling_folders import assert_close, embedding, hidden_states, pooled

from compiled_engine import LLM, PoolingParams

TEXTS = [
    "hello world",
    "the quick brown fox " * 12,
    "a",
    "def add(a, b):\n    return a + b",
    "über 你好",
    "<|user|>hello <|user|><|user|>world",  # in some families the padding token
    "hello world",
]
TANH = "torch.nn.modules.activation.Tanh"
Engine = Callable[..., LLM]


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Start an engine whose steps hold few texts."""
    made: list[LLM] = []

    def start(path: Path, mode: str = "eager", **options: Any) -> LLM:
        small = {"device": "cpu", "max_num_batched_tokens": 320, "max_num_seqs": 4, "progress": False}
        if mode != "eager":
            small |= {"cache_dir": tmp_path / "cache", "strict_passes": True}
            small |= {"compile_ranges": ()} if mode == "compiled" else {}
        made.append(LLM(path, mode=mode, **small | options))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_each_family_are_those_of_transformers(family: str, tmp_path: Path, engine: Engine) -> None:
    model = make_encoder(tmp_path, family)
    llm = engine(tmp_path, runner="pooling")
    assert llm.config.model.pooling is not None
    assert llm.config.model.pooling.kinds == ("mean",)
    for _ in range(2):
        for output in llm.embed(TEXTS):
            vector = pooled(("mean",), hidden_states(model, output.prompt_token_ids))
            assert_close(output.outputs.embedding, torch.nn.functional.normalize(vector, dim=0))
            assert output.num_cached_tokens == 0


def test_a_compiled_encoder_is_found_again_without_its_code(tmp_path: Path, engine: Engine) -> None:
    """Windows on both sides, packed q, k and v, gates: the passes match all, and a warm start traces nothing."""
    modules: dict[str, Any] = {"kinds": ("cls",), "dense": ((HIDDEN, 24, True, TANH),)}
    model = make_encoder(tmp_path, "modernbert", **modules)
    for traces in (1, 0):
        llm = engine(tmp_path, "compiled")
        metrics = llm.metrics()
        assert (metrics["traces"], metrics["compiles"] > 0) == (traces, traces > 0)
        assert metrics["blocks_total"] == metrics["kv_cache_bytes"] == 0
        for output in llm.embed(TEXTS):
            assert_close(output.outputs.embedding, embedding(tmp_path, model, output.prompt_token_ids, **modules))
        assert llm.metrics()["passes"]["1-320"]["layer_norm"]["matches"] == 9


@pytest.mark.shown_by("engine/test_encoders.py::test_a_compiled_encoder_is_found_again_without_its_code")
def test_biases_by_relative_position_enter_a_compiled_encoder(tmp_path: Path, engine: Engine) -> None:
    """MPNet with the modules of all-mpnet-base-v2: mean pooling, normalised."""
    model = make_encoder(tmp_path, "mpnet", kinds=("mean",), max_length=300)
    llm = engine(tmp_path, "compiled", verify_passes=True)
    assert llm.config.model.num_biases == 257
    for output in llm.embed(TEXTS):
        assert_close(output.outputs.embedding, embedding(tmp_path, model, output.prompt_token_ids, kinds=("mean",)))
    assert llm.metrics()["passes"]["1-320"]["layer_norm"]["matches"] == 1 + 2 * 4


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "mpnet"])
@pytest.mark.parametrize("mode", ["eager", "graphed"])
def test_vectors_on_a_gpu(family: str, mode: str, tmp_path: Path, engine: Engine) -> None:
    model = make_encoder(tmp_path, family)
    # Families share the run's kernels, and compile them in this process: tests side by side have a core each.
    shared = {} if mode == "eager" else {"cache_dir": None, "compile_workers": 0}
    llm = engine(tmp_path, mode, device="cuda", dtype="float32", **shared)
    for _ in range(2):
        for output in llm.embed(TEXTS):
            vector = pooled(("mean",), hidden_states(model, output.prompt_token_ids))
            assert_close(output.outputs.embedding, torch.nn.functional.normalize(vector, dim=0))
    metrics = llm.metrics()
    assert (metrics["graph_replays"] > 0) == (mode == "graphed")
    if mode == "graphed":
        assert {int(key.split()[1]) for key in metrics["graph_replays_by_key"]} <= {*llm.config.graph.token_sizes}
        assert llm.config.graph.decode_sizes == ()


def logits_of(model: Any, first: str, second: str | None, llm: LLM) -> torch.Tensor:
    tokenizer = llm.get_tokenizer()
    encoded = tokenizer(first, second, return_tensors="pt", return_token_type_ids=True)
    known = {name: value for name, value in encoded.items() if name != "token_type_ids"}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        known["token_type_ids"] = encoded["token_type_ids"]
    return model(**known).logits[0]


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(("qwen2", "mpnet"))])
def test_classifiers_have_the_heads_of_their_families(family: str, tmp_path: Path, engine: Engine) -> None:
    pooling = {"classifier_pooling": "mean"} if family == "modernbert" else {}
    model = make_encoder_classifier(tmp_path, family, **pooling)
    llm = engine(tmp_path)
    for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
        assert_close(output.outputs.probs, torch.softmax(logits_of(model, text, None, llm), dim=0))
    (raw,) = llm.classify(TEXTS[1], PoolingParams(use_activation=False))
    assert_close(raw.outputs.probs, logits_of(model, TEXTS[1], None, llm))
    as_vectors = engine(tmp_path, convert="embed")
    (output,) = as_vectors.embed(TEXTS[1])
    vector = pooled(("mean",), hidden_states(model.base_model, output.prompt_token_ids))
    assert_close(output.outputs.embedding, torch.nn.functional.normalize(vector, dim=0))


@pytest.mark.parametrize(
    "mode",
    [
        "eager",
        pytest.param(
            "compiled",
            marks=pytest.mark.shown_by(
                "engine/test_encoders.py::test_a_compiled_encoder_is_found_again_without_its_code"
            ),
        ),
    ],
)
def test_a_cross_encoder_tells_the_texts_of_a_pair_apart(mode: str, tmp_path: Path, engine: Engine) -> None:
    model = make_encoder_classifier(tmp_path, "bert", 1)
    llm = engine(tmp_path, mode, **({} if mode == "eager" else {"verify_passes": True}))
    documents = ["world", "the fox " * 9, "a"]
    for document, output in zip(documents, llm.score("hello", documents), strict=True):
        expected = torch.sigmoid(logits_of(model, "hello", document, llm))
        assert output.outputs.score == pytest.approx(float(expected), abs=1e-5)
    (pair,) = llm.score("hello", ["world"], PoolingParams(use_activation=False))
    assert llm.get_tokenizer().decode(pair.prompt_token_ids) == "<s>hello</s>world</s>"
    without_types = model(torch.tensor([pair.prompt_token_ids])).logits[0]
    assert abs(pair.outputs.score - float(without_types)) > 1e-3
    (cut,) = llm.score("hello", ["the fox " * 9], PoolingParams(truncate_prompt_tokens=12))
    whole = llm.get_tokenizer()("hello", "the fox " * 9, truncation="longest_first", max_length=12)["input_ids"]
    assert cut.prompt_token_ids == whole


def test_the_activation_of_a_cross_encoder_is_that_of_its_folder(tmp_path: Path, engine: Engine) -> None:
    model = make_encoder_classifier(tmp_path, "bert", 1)
    values = json.loads((tmp_path / "config.json").read_text())
    values["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    llm = engine(tmp_path)
    (output,) = llm.score("hello", "world")
    assert output.outputs.score == pytest.approx(float(logits_of(model, "hello", "world", llm)), abs=1e-4)


@pytest.mark.parametrize("cross", [False, True])
def test_results_are_those_of_sentence_transformers(cross: bool, tmp_path: Path, engine: Engine) -> None:
    library = pytest.importorskip("sentence_transformers")
    if cross:
        make_encoder_classifier(tmp_path, "bert", 1)
        expected = library.CrossEncoder(str(tmp_path), device="cpu").predict([("hello", text) for text in TEXTS])
        scores = [output.outputs.score for output in engine(tmp_path).score("hello", TEXTS)]
        assert scores == pytest.approx(expected.tolist(), abs=1e-4)
        return
    make_encoder(tmp_path, "xlm-roberta", kinds=("cls", "max"), old=True)
    expected = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    for output, vector in zip(engine(tmp_path).embed(TEXTS), expected, strict=True):
        assert_close(output.outputs.embedding, torch.from_numpy(vector))


def test_each_token_has_a_vector(tmp_path: Path, engine: Engine) -> None:
    model = make_encoder(tmp_path, "distilbert")
    for output in engine(tmp_path).encode(TEXTS, pooling_task="token_embed"):
        expected = torch.nn.functional.normalize(hidden_states(model, output.prompt_token_ids), dim=1)
        assert_close(output.outputs.data, expected)


def test_a_text_longer_than_a_step_names_the_option(tmp_path: Path, engine: Engine) -> None:
    make_encoder(tmp_path)
    llm = engine(tmp_path, max_num_batched_tokens=40)
    with pytest.raises(
        ValueError, match=r"at most 40 tokens \(max_num_batched_tokens 40: an encoder computes a text in"
    ):
        llm.embed(["a", "the quick brown fox " * 12])
    (cut,) = llm.embed("the quick brown fox " * 12, PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 40
    assert cut.prompt_token_ids[-1] == llm.get_tokenizer().eos_token_id
    whole = engine(tmp_path, max_num_batched_tokens=None)
    assert whole.config.scheduler.max_num_batched_tokens >= whole.config.model.max_model_len == 320


def test_a_long_text_among_many_short_ones(tmp_path: Path, engine: Engine) -> None:
    """Steps are full but for what the long text needs: its step holds it alone."""
    model = make_encoder(tmp_path)
    llm = engine(tmp_path, max_num_seqs=64)
    ids = [[1, 5, 2]] * 100 + [[7] * 318] + [[1, 9, 8, 2]] * 100
    outputs = llm.embed([{"prompt_token_ids": each} for each in ids])
    assert llm.metrics()["steps"] <= 6
    for place in (0, 100, 200):
        vector = pooled(("mean",), hidden_states(model, ids[place]))
        assert_close(outputs[place].outputs.embedding, torch.nn.functional.normalize(vector, dim=0))


def test_options_that_an_encoder_has_no_use_for_are_refused(tmp_path: Path, engine: Engine) -> None:
    make_encoder(tmp_path)
    for options, message in (
        ({"num_blocks": 5}, "num_blocks is 5, but an encoder has no KV cache; allowed: None"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but models of BertModel .* cannot be divided"),
        ({"runner": "generate"}, "BertModel generates no text; allowed: runner='pooling'"),
        ({"attention_backend": "cpp"}, "attention_backend 'cpp' cannot run this model here: causal is False"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(tmp_path, **options)
    llm = engine(tmp_path)
    assert llm.config.reasons["cache.enable_prefix_caching"].startswith("an encoder caches nothing")
    assert llm.config.reasons["model.pooling"] == "BertModel generates no text"


@pytest.mark.parametrize(
    ("kind", "architecture", "cause"),
    [
        ("deberta-v2", "DebertaV2Model", r"scores of contents and relative positions \(disentangled attention\)"),
        ("albert", "AlbertModel", "its layers attend several times, or are run several times"),
    ],
)
def test_encoders_that_cannot_run_are_refused_by_their_mechanism(
    kind: str, architecture: str, cause: str, tmp_path: Path, engine: Engine
) -> None:
    values = {"model_type": kind, "architectures": [architecture], "num_hidden_layers": 3, "hidden_size": 48}
    values |= {"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 400, "relative_attention": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{architecture} cannot be run through transformers' code: .*{cause}"):
        engine(tmp_path, load_format="dummy")
