"""Greedy tokens of the whole engine equal transformers', however requests are batched, chunked, cached or preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

NUM_PROMPTS = 50
OUTPUT_LEN = 12


@pytest.fixture(scope="module")
def prompts(bundled_model_path: Path, bundled_tokenizer: Any) -> list[list[int]]:
    """Pieces of Python source of mixed lengths; some share a beginning, some are repeated whole."""
    ids = bundled_tokenizer.hf((bundled_model_path / "held_out.txt").read_text())["input_ids"]
    generator = random.Random(0)
    cut = []
    for _ in range(NUM_PROMPTS):
        start = generator.choice([0, 500, generator.randrange(len(ids) - 200)])
        cut.append(ids[start : start + generator.choice([1, 2, 15, 16, 17, 32, 64, generator.randrange(1, 150)])])
    return cut


@pytest.fixture(scope="module")
def expected(bundled_model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32).eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_LEN,
            min_new_tokens=OUTPUT_LEN,
            do_sample=False,
        )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, min_tokens=OUTPUT_LEN, ignore_eos=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 7},
    "tiny pool": {"num_blocks": 48, "block_size": 4, "max_num_seqs": 16, "max_model_len": 192},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("compiled", "defaults"),
        ("eager", "tiny pool"),
        *(pytest.param("eager", name, marks=pytest.mark.product(one_in=1000)) for name in list(OPTIONS)[:3]),
        *(pytest.param("compiled", name, marks=pytest.mark.product(one_in=1000)) for name in list(OPTIONS)[1:]),
    ],
)
def test_greedy_tokens_equal_transformers(
    mode: str, name: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    options, order = OPTIONS[name], list(range(NUM_PROMPTS))
    random.Random(1).shuffle(order)
    with LLM(device="cpu", mode=mode, progress=False, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in order], PARAMS)
        metrics = llm.metrics()
    got = {i: list(output.outputs[0].token_ids) for i, output in zip(order, outputs, strict=True)}
    assert [got[i] for i in range(NUM_PROMPTS)] == expected
    if "num_blocks" in options:
        assert metrics["preemptions"] > 0
    if options.get("enable_prefix_caching", True) and "num_blocks" not in options:
        assert metrics["prefix_hits"] > 0
    assert metrics["kv_usage"] == 0


def test_the_same_request_twice_comes_from_the_prefix_cache(prompts: list[list[int]]) -> None:
    prompt = max(prompts, key=len)[:64]
    with LLM(device="cpu", mode="eager", progress=False, block_size=16) as llm:
        first, second = (llm.generate({"prompt_token_ids": prompt}, PARAMS)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48  # a full hit still leaves one token, so one block, to compute
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
