"""Embeddings, classes and scores of decoders: equal to the definition of sentence-transformers, and to transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_folders import (
    assert_close,
    embedding,
    hidden_states,
    make_classifier,
    make_embedder,
    make_reranker,
    write_modules,
)

from compiled_engine import LLM, AsyncLLM, LogitsProcessor, PoolerConfig, PoolingParams

TEXTS = ["hello world", "the quick brown fox " * 20, "a", "def add(a, b):\n    return a + b", "über 你好"]
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
KINDS = {
    "last token": {"kinds": ("lasttoken",)},
    "mean, two linears, old spelling": {
        "kinds": ("mean",),
        "dense": ((56, 24, True, TANH), (24, 40, False, IDENTITY)),
        "old": True,
    },
    "first token": {"kinds": ("cls",), "normalize": False, "old": True},
    "several, one linear": {
        "kinds": ("max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        "dense": ((224, 32, True, TANH),),
    },
}  # fmt: skip
Engine = Callable[..., LLM]


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Start an engine whose steps are so small that prompts are computed in chunks."""
    made: list[LLM] = []

    def start(path: Path, mode: str = "eager", **options: Any) -> LLM:
        small = {"device": "cpu", "max_num_batched_tokens": 32, "max_num_seqs": 4, "progress": False}
        if mode != "eager":
            small |= {"cache_dir": tmp_path / "cache", "compile_ranges": () if mode == "compiled" else [8]}
        made.append(LLM(path, mode=mode, **small | options))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("eager", name) for name in KINDS),
        *(pytest.param("compiled", name, marks=pytest.mark.product(one_in=1000)) for name in KINDS),
    ],
)
def test_vectors_of_ragged_batches_are_those_of_the_definition(
    name: str, mode: str, tmp_path: Path, engine: Engine
) -> None:
    modules: dict[str, Any] = KINDS[name]
    decoder = make_embedder(tmp_path, alone=name == "last token", **modules)
    llm = engine(tmp_path, mode)
    for _ in range(2):  # the second time a prefix may be cached
        outputs = llm.embed(TEXTS)
        for output in outputs:
            assert output.finished
            assert_close(output.outputs.embedding, embedding(tmp_path, decoder, output.prompt_token_ids, **modules))
    hits = [output.num_cached_tokens for output in outputs]
    assert (max(hits) > 0) == (modules["kinds"] == ("lasttoken",))
    assert ("cache.enable_prefix_caching" in llm.config.reasons) == (modules["kinds"] != ("lasttoken",))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["eager", "graphed"])
def test_vectors_on_a_gpu_are_those_of_the_definition(name: str, mode: str, tmp_path: Path, engine: Engine) -> None:
    modules: dict[str, Any] = KINDS[name]
    decoder = make_embedder(tmp_path, **modules)
    # Kinds share the run's kernels, and compile them in this process: tests side by side have a core each.
    shared = {} if mode == "eager" else {"cache_dir": None, "compile_workers": 0}
    # Other tests may hold most of the GPU's memory: graphs are captured all the same.
    memory = {"num_blocks": 256, "gpu_memory_utilization": 1.0}
    llm = engine(tmp_path, mode, device="cuda", dtype="float32", **memory, **shared)
    for _ in range(2):
        for output in llm.embed(TEXTS):
            assert_close(output.outputs.embedding, embedding(tmp_path, decoder, output.prompt_token_ids, **modules))
    assert (llm.metrics()["graph_replays"] > 0) == (mode == "graphed")


@pytest.mark.parametrize("old", [False, True])
def test_vectors_are_those_of_sentence_transformers(old: bool, tmp_path: Path, engine: Engine) -> None:
    library = pytest.importorskip("sentence_transformers")
    kinds = ("cls", "max", "mean") if old else ("lasttoken", "mean_sqrt_len_tokens", "cls")
    make_embedder(tmp_path, kinds=kinds, dense=((168, 24, True, TANH), (24, 40, False, IDENTITY)), old=old)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"pad_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    for output, vector in zip(engine(tmp_path).embed(TEXTS), expected, strict=True):
        assert_close(output.outputs.embedding, torch.from_numpy(vector))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi3"])
def test_families_pool(family: str, tmp_path: Path, engine: Engine) -> None:
    decoder = make_embedder(tmp_path, family, alone=True, kinds=("lasttoken",))
    for output in engine(tmp_path).embed(TEXTS):
        assert_close(
            output.outputs.embedding, embedding(tmp_path, decoder, output.prompt_token_ids, kinds=("lasttoken",))
        )


def test_code_of_transformers_pools(tmp_path: Path, engine: Engine) -> None:
    modules: dict[str, Any] = {"kinds": ("mean",), "dense": ((56, 24, True, TANH),)}
    decoder = make_embedder(tmp_path, **modules)
    for output in engine(tmp_path, model_impl="transformers").embed(TEXTS[:3]):
        assert_close(output.outputs.embedding, embedding(tmp_path, decoder, output.prompt_token_ids, **modules))


def test_an_embedding_is_cut_before_it_is_normalised(tmp_path: Path, engine: Engine) -> None:
    decoder = make_embedder(tmp_path, kinds=("lasttoken",))
    llm = engine(tmp_path)
    (output,) = llm.embed(TEXTS[0], PoolingParams(dimensions=8))
    whole = hidden_states(decoder, output.prompt_token_ids)[-1]
    assert_close(output.outputs.embedding, torch.nn.functional.normalize(whole[:8], dim=0))
    (output,) = llm.embed(TEXTS[0], PoolingParams(normalize=False))
    assert_close(output.outputs.embedding, whole)
    with pytest.raises(ValueError, match="dimensions must be at most 56, the model's, got 57"):
        llm.embed(TEXTS[0], PoolingParams(dimensions=57))


def test_each_token_has_a_vector(tmp_path: Path, engine: Engine) -> None:
    decoder = make_embedder(tmp_path, kinds=("lasttoken",))
    llm = engine(tmp_path)
    for _ in range(2):  # no cached prefix is read
        for output in llm.encode(TEXTS, pooling_task="token_embed"):
            expected = torch.nn.functional.normalize(hidden_states(decoder, output.prompt_token_ids), dim=1)
            assert_close(output.outputs.data, expected)
            assert output.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("num_labels", "problem", "activation"),
    [(3, None, torch.softmax), (1, None, None), (4, "multi_label_classification", None), (1, "regression", "none")],
)
def test_classes_are_those_of_transformers(
    num_labels: int, problem: str | None, activation: Any, tmp_path: Path, engine: Engine
) -> None:
    model = make_classifier(tmp_path, num_labels, problem_type=problem)
    llm = engine(tmp_path)
    assert llm.config.model.pooling is not None
    assert len(llm.config.model.pooling.labels) == num_labels
    for output in llm.classify(TEXTS):
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        expected = logits if activation == "none" else torch.sigmoid(logits)
        if activation is torch.softmax:
            expected = torch.softmax(logits, dim=0)
        assert_close(output.outputs.probs, expected)
    (raw,) = llm.classify(TEXTS[0], PoolingParams(use_activation=False))
    assert_close(raw.outputs.probs, model(torch.tensor([raw.prompt_token_ids])).logits[0])


def test_a_score_is_the_label_of_a_pair_or_the_cosine_of_embeddings(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    model = make_classifier(tmp_path / "one", 1)
    llm = engine(tmp_path / "one")
    first, second = llm.score("hello", ["world", "the fox"])
    for output, document in ((first, "world"), (second, "the fox")):
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == f"hello{document}"
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits)), abs=1e-4)
    make_embedder(tmp_path / "many")
    llm = engine(tmp_path / "many", runner="pooling")
    vectors = [torch.tensor(output.outputs.embedding) for output in llm.embed(["hello", "a", "b"])]
    scores = [output.outputs.score for output in llm.score(["hello", "a"], ["a", "b"])]
    assert scores == pytest.approx([float(vectors[0] @ vectors[1]), float(vectors[1] @ vectors[2])], abs=1e-5)
    with pytest.raises(ValueError, match="queries must be one, or one for each of the 3 documents, got 2"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_a_reranker_judges_by_two_tokens_in_its_template(tmp_path: Path, engine: Engine) -> None:
    model = make_reranker(tmp_path)
    llm = engine(tmp_path, convert="classify")
    ids = llm.get_tokenizer().convert_tokens_to_ids(["no", "yes"])
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokenizer = llm.get_tokenizer()
    for output, document in zip(llm.score("fox", ["dog", "a"], instruction="Find it"), ["dog", "a"], strict=True):
        body = f"<Instruct>: Find it\n<Query>: fox\n<Document>: {document}"
        expected_ids = [i for part in (prefix, body, suffix) for i in tokenizer.encode(part, add_special_tokens=False)]
        assert output.prompt_token_ids == expected_ids
        logits = model(torch.tensor([expected_ids])).logits[0, -1, ids]
        assert output.outputs.score == pytest.approx(float(torch.softmax(logits, dim=0)[1]), abs=1e-4)


def test_one_token_may_judge_alone(tmp_path: Path, engine: Engine) -> None:
    model = make_reranker(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"},
                {"idx": 1, "name": "1", "path": "1", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
            ]
        )
    )
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    (output,) = engine(tmp_path).score("fox", "dog")
    logit = model(torch.tensor([output.prompt_token_ids])).logits[0, -1, 7]
    assert output.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-4)


def test_prompts_and_lengths_of_the_folder(tmp_path: Path, engine: Engine) -> None:
    make_embedder(tmp_path, kinds=("lasttoken",), prompts={"query": "find: ", "document": ""}, max_length=20)
    llm = engine(tmp_path)
    assert llm.config.model.max_model_len == 20
    plain, named = llm.embed(["find: hello"]), llm.embed(["hello"], prompt_name="query")
    assert named[0].outputs == plain[0].outputs
    with pytest.raises(ValueError, match="prompt_name is 'x'; allowed: query, document"):
        llm.embed("hello", prompt_name="x")
    with pytest.raises(ValueError, match=r"at most 20 tokens \(max_model_len 20\).*PoolingParams"):
        llm.embed("hello world " * 20)
    (cut,) = llm.embed("hello world " * 20, PoolingParams(truncate_prompt_tokens=-1))
    whole = llm.get_tokenizer().encode("hello world " * 20)
    assert cut.prompt_token_ids == whole[:20]
    assert len(llm.embed({"prompt_token_ids": [5] * 20})[0].prompt_token_ids) == 20


def test_options_override_the_folder(tmp_path: Path, engine: Engine) -> None:
    decoder = make_embedder(tmp_path, kinds=("mean",))
    llm = engine(tmp_path, pooler_config=PoolerConfig(seq_pooling_type="LAST", normalize=False, dimensions=5))
    (output,) = llm.embed("hello")
    assert_close(output.outputs.embedding, hidden_states(decoder, output.prompt_token_ids)[-1][:5])
    assert llm.config.reasons["model.pooling.kinds"] == "pooler_config"
    with pytest.raises(ValueError, match=r"pooler_config has no 'pool'; allowed: pooling_type"):
        engine(tmp_path, pooler_config={"pool": 1})
    with pytest.raises(ValueError, match=r"logits_processors is .*, but the model pools"):
        engine(tmp_path, logits_processors=(LogitsProcessor,))
    generates = engine(tmp_path, runner="generate")
    assert generates.config.model.pooling is None
    with pytest.raises(ValueError, match="does not pool; allowed: runner='pooling'"):
        generates.embed("hello")
    with pytest.raises(ValueError, match="generates no text"):
        llm.generate("hello")


def test_a_model_does_what_it_is_for(tmp_path: Path, engine: Engine) -> None:
    make_classifier(tmp_path, 3)
    llm = engine(tmp_path)
    with pytest.raises(ValueError, match="task is 'embed', but the model can classify and token_classify"):
        llm.embed("hello")
    with pytest.raises(ValueError, match="score needs a classifier with one label, and the model has 3"):
        llm.score("a", "b")
    as_vectors = engine(tmp_path, convert="embed")
    assert len(as_vectors.embed("hello")[0].outputs.embedding) == 56


def test_a_long_text_among_many_short_ones(tmp_path: Path, engine: Engine) -> None:
    decoder = make_embedder(tmp_path, kinds=("mean",))
    texts = [*["a b"] * 30, "x" * 220, *["hello"] * 30]
    outputs = engine(tmp_path, num_blocks=16).embed(texts)  # some are preempted
    for output in outputs[28:33]:
        assert_close(output.outputs.embedding, embedding(tmp_path, decoder, output.prompt_token_ids, kinds=("mean",)))


def test_modules_that_cannot_be_run_are_refused(tmp_path: Path, engine: Engine) -> None:
    make_embedder(tmp_path)
    write_modules(tmp_path, kinds=("mean",), dense=((56, 8, True, "torch.nn.modules.activation.PReLU"),))
    with pytest.raises(ValueError, match="activation_function must be one of Identity, Tanh"):
        engine(tmp_path)


def test_many_callers_pool_at_once(tmp_path: Path) -> None:
    decoder = make_embedder(tmp_path, kinds=("lasttoken",))

    async def all_calls() -> None:
        engine = await AsyncLLM.start(tmp_path, device="cpu", mode="eager", max_num_seqs=4, progress=False)
        try:
            batches = await asyncio.gather(*(engine.embed(TEXTS) for _ in range(5)))
            for output in (output for batch in batches for output in batch):
                expected = embedding(tmp_path, decoder, output.prompt_token_ids, kinds=("lasttoken",))
                assert_close(output.outputs.embedding, expected)
            (rows,) = await engine.encode("hello world", pooling_task="token_embed")
            assert rows.outputs.data.shape == (len(rows.prompt_token_ids), 56)
            assert len(await engine.score("a", TEXTS)) == len(TEXTS)
            task = asyncio.create_task(engine.embed(TEXTS * 20))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_unfinished == 0
            with pytest.raises(ValueError, match="generates no text"):
                await anext(engine.generate("hello"))
        finally:
            await engine.shutdown()

    asyncio.run(all_calls())
