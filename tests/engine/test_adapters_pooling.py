"""Adapters of models that pool: the result of each text is that of its model with the adapter merged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import BASE, LINEARS, make_adapter, merge
from adapter_folders import OPTIONS as COMPILED
from checkpoints import make_checkpoint
from encoder_folders import make_encoder, make_encoder_classifier
from pooling_folders import assert_close, embedding, hidden_states, make_classifier, make_embedder, pooled
from torch import nn

from compiled_engine import LLM, AsyncLLM, LoRARequest

TEXTS = ["hello world", "the quick brown fox " * 6, "a", "def add(a, b):"]
MEAN: dict[str, Any] = {"kinds": ("mean",), "dense": ((56, 24, True, "torch.nn.modules.activation.Tanh"),)}
# Fewer slots than adapters; prompts of decoders come in chunks.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "progress": False,
    "max_num_seqs": 4,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 16,
}
CHUNKS = {"max_num_batched_tokens": 32}
ENCODER = ("query", "value", "intermediate.dense", "output.dense")
Oracle = Callable[[Path, Any, list[int]], torch.Tensor]


def vector(path: Path, model: Any, ids: list[int]) -> torch.Tensor:
    return nn.functional.normalize(pooled(("mean",), hidden_states(model, ids)), dim=0)


def vector_of_modules(path: Path, model: Any, ids: list[int]) -> torch.Tensor:
    return embedding(path, model, ids, **MEAN)


def classes(path: Path, model: Any, ids: list[int]) -> torch.Tensor:
    return torch.softmax(model(torch.tensor([ids])).logits[0], dim=0)


# What makes the checkpoint, the linears that are adapted, the oracle, the call, its values, and options.
MODELS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], Oracle, str, str, dict[str, Any]]] = {
    "embedder": (lambda path: make_embedder(path, **MEAN), LINEARS, vector_of_modules, "embed", "embedding", CHUNKS),
    "classifier": (make_classifier, LINEARS, classes, "classify", "probs", CHUNKS),
    "encoder": (make_encoder, ENCODER, vector, "embed", "embedding", {}),
    "encoder that classifies": (make_encoder_classifier, ENCODER, classes, "classify", "probs", {}),
}


def make_adapters(path: Path, model: nn.Module, targets: tuple[str, ...], count: int = 3) -> list[LoRARequest]:
    folders = (make_adapter(path / f"{i}", model, 4 * (i + 1), targets=targets, seed=i) for i in range(count))
    return [LoRARequest(f"adapter {i}", 1 + i, folder) for i, folder in enumerate(folders)]


def with_adapter(model: nn.Module, request: LoRARequest | None) -> nn.Module:
    return model if request is None else merge(deepcopy(model), Path(request.lora_path))


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_a_batch_have_adapters(name: str, tmp_path: Path) -> None:
    make, targets, oracle, call, values, options = MODELS[name]
    model = make(tmp_path / "base")
    requests = [None, *make_adapters(tmp_path, model, targets)]
    with LLM(tmp_path / "base", **OPTIONS | options) as llm:
        for _ in range(2):
            outputs = getattr(llm, call)(TEXTS, lora_request=requests)
            for request, output in zip(requests, outputs, strict=True):
                expected = oracle(tmp_path / "base", with_adapter(model, request), output.prompt_token_ids)
                assert_close(getattr(output.outputs, values), expected)
        llm.core.check_integrity()
        assert llm.metrics()["adapters_in_slots"] == 2


def test_compiled_models_that_pool_have_a_forward_with_adapters(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With the shape and the options of engines that generate, whose kernels a run has compiled already."""
    if not pytestconfig.getoption("--all"):
        pytest.skip("its callables are those of test_signatures.py, and its forward that of test_adapters.py: --all")
    base = make_checkpoint(tmp_path / "base", "qwen3", **BASE)
    requests = [None, *make_adapters(tmp_path, base, LINEARS)]
    prompts = [[3, 99, 5, 27], [7] * 20, list(range(1, 34)), [11]]
    options = COMPILED | {"mode": "compiled", "runner": "pooling", "strict_passes": True, "compile_ranges": []}
    with LLM(tmp_path / "base", **options) as llm:
        for request, output in zip(requests, llm.embed(prompts, lora_request=requests), strict=True):
            whole = hidden_states(with_adapter(base, request).base_model, output.prompt_token_ids)
            assert_close(output.outputs.embedding, nn.functional.normalize(whole[-1], dim=0))
        assert list(llm.metrics()["passes"]) == ["1-16", "adapted/1-16"]
        assert llm.metrics()["passes"]["adapted/1-16"]["adapters"] == {"matches": 8, "contract": 8}


def test_results_of_each_token_and_scores_have_adapters(tmp_path: Path) -> None:
    model = make_embedder(tmp_path / "base", kinds=("lasttoken",))
    first, second = make_adapters(tmp_path, model, LINEARS, 2)
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        (tokens,) = llm.encode(TEXTS[1], pooling_task="token_embed", lora_request=second)
        whole = hidden_states(with_adapter(model, second), tokens.prompt_token_ids)
        assert_close(tokens.outputs.data, nn.functional.normalize(whole, dim=-1))
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed(TEXTS, lora_request=first)]
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], lora_request=first)]
        assert scores == pytest.approx([float(vectors[0] @ other) for other in vectors[1:]], abs=1e-5)
        assert scores != pytest.approx([each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:])], abs=1e-2)


def test_a_prefix_is_not_shared_with_another_adapter(tmp_path: Path) -> None:
    model = make_embedder(tmp_path / "base", kinds=("lasttoken",))
    first, second = make_adapters(tmp_path, model, LINEARS, 2)
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        outputs = [llm.embed([[7] * 33], lora_request=each)[0] for each in (None, first, second, first)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 32]


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (make_classifier, "score"),
        (make_encoder_classifier, "classifier"),
        (make_encoder_classifier, "pooler.dense"),
    ],
)
def test_the_head_behind_the_pooling_has_no_adapter(make: Callable[[Path], Any], head: str, tmp_path: Path) -> None:
    """The head processes pooled values, not tokens."""
    model = make(tmp_path / "base")
    (request,) = make_adapters(tmp_path, model, (head,), 1)
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        with pytest.raises(ValueError, match=rf"the base model has no linear \S*{head}"):
            llm.classify(TEXTS, lora_request=request)
        assert len(llm.classify(TEXTS)) == len(TEXTS)


def test_adapters_are_loaded_and_unloaded_between_requests(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "base")
    requests = make_adapters(tmp_path, model, ENCODER)

    async def serve() -> None:
        engine = AsyncLLM(tmp_path / "base", core="in_process", **OPTIONS)
        for request in (*requests, requests[0]):
            digest = await engine.load_adapter(request)
            (output, *_) = await engine.embed([TEXTS[0]], lora_request=request)
            expected = vector(tmp_path / "base", with_adapter(model, request), output.prompt_token_ids)
            assert_close(output.outputs.embedding, expected)
            await engine.unload_adapter(digest)
            assert (await engine.metrics())["adapters_loaded"] == 0
        bad = make_adapter(tmp_path / "bad", model, 17, targets=ENCODER)
        with pytest.raises(ValueError, match="rank 17; allowed: up to max_lora_rank, 16"):
            await engine.embed(TEXTS, lora_request=LoRARequest("bad", 9, bad))
        await engine.shutdown()

    asyncio.run(serve())
