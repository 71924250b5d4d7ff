"""Engines of two ranks on the CPU give the tokens of one: with everything that a scheduler and a sampler do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from family_comparison import difference_of
from small_engines import CHUNKED, PROMPTS

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# One case is drawn of each test; `make test-all` runs every one.
pytestmark = pytest.mark.product(one_in=1000)

# Few blocks, so that requests are preempted.
ENGINE = CHUNKED | {"max_num_batched_tokens": 24, "block_size": 16, "num_blocks": 7}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
COMMON = "import os\nimport sys\nimport json\n\n\ndef read(path):\n    with open(path) as file:\n        return "
TEXTS = [COMMON + "json", COMMON + "file.read()", *PROMPTS]


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(mode="eager", **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """A step is launched before the results of the one before it are there. Compiled ranks: test_adapters.py, and with
    stages test_pipeline_parallel_engine.py."""
    with LLM(mode="eager", async_scheduling=True, **ENGINE, **TWO) as llm:
        yield llm


def same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        for mine, other in zip(our.outputs, their.outputs, strict=True):
            assert list(mine.token_ids) == list(other.token_ids)
            for row, expected in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in expected.items()}, abs=1e-3
                )
        for row, expected in zip(our.prompt_logprobs or [], their.prompt_logprobs or [], strict=True):
            assert (row is None) == (expected is None)
            if row is not None and expected is not None:
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in expected.items()}, abs=1e-3
                )


KINDS: dict[str, dict[str, Any]] = {
    "greedy, with log-probabilities": {"temperature": 0, "logprobs": 3},
    "log-probabilities of prompts": {"temperature": 0, "prompt_logprobs": 2},
    "seeded, with filters": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "repetition_penalty": 1.2, "n": 2},
    "biases and words": {"temperature": 0, "logit_bias": {100: 3.0}, "min_tokens": 12},
}


def test_the_tokens_are_those_of_one(one: LLM, two: LLM) -> None:
    """All kinds of sampling side by side; twice, as the second time the prompts are in the prefix cache."""
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **kind) for kind in KINDS.values()]
    for _ in range(2):
        same(*(engine.generate(TEXTS, params, use_tqdm=False) for engine in (two, one)))
    metrics = two.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["collectives"] == "gloo"


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, KV heads shared": ("mistral", {"sliding_window": 8, "num_key_value_heads": 1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, a vocabulary that stays whole": ("qwen3", {"vocab_size": 133}),
    "gemma2": ("gemma2", {}),
    "gemma3, KV heads shared": ("gemma3", {"num_key_value_heads": 1}),
    "phi3, packed": ("phi3", {}),
    "phi3, packed, KV heads shared": ("phi3", {"num_key_value_heads": 1}),
    "qwen3 with experts": ("qwen3_moe", {"seed": 1}),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 134, "num_hidden_layers": 2}


# Each packs its weights in a way of its own; of the others, whose graphs are verified in
# passes/test_tensor_parallel_pass.py, one is drawn.
ALWAYS = ("phi3, packed, KV heads shared", "qwen3 with experts")
DRAWN = pytest.mark.product(one_in=1000)


@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=DRAWN) for name in FAMILIES])
def test_every_family(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    make_checkpoint(tmp_path, family, **HEADS | changes)
    options = {**ENGINE, "mode": "eager", "skip_tokenizer_init": True}
    prompts = [{"prompt_token_ids": [(7 * i * i + 3 * j) % 130 for j in range(5 + 9 * i)]} for i in range(4)]
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, detokenize=False)
    found = []
    for more in ({}, TWO):
        with LLM(tmp_path, **options, **more) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
    same(*found)


@pytest.mark.parametrize("name", ["glm4", "mixtral"])
def test_code_of_transformers(name: str, tmp_path: Path) -> None:
    """Packed rows, scaled embeddings and experts are divided as the family's code takes them apart."""
    oracle = write_checkpoint(tmp_path, family(name).to_divide())
    options = {"device": "cpu", "mode": "eager", **TWO}
    assert difference_of(tmp_path, oracle, options).is_right(torch.float32)
