"""Tokens of requests side by side in a small engine, and of transformers' model, which computes each prompt whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# Of very different lengths, so that some are computed in chunks beside decodes.
PROMPTS = [[7, 8, 9], list(range(20, 65)), [3], list(range(80, 96)), [5, 5, 5, 5]]
SMALL: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 80, "dtype": "float32"}
MAX_TOKENS = 12


def greedy(oracle: Any, prompt: Sequence[int], count: int = MAX_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat((ids, oracle(ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt) :].tolist()


def generated(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of each of PROMPTS, and the engine's metrics. options: further ones of `LLM`."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
    with LLM(folder, **SMALL | options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.metrics()


def expected_in_company(folder: Path, oracle: Any) -> list[list[int]]:
    """Return the oracle's tokens for PROMPTS. An eager engine gives the same in chunks, and where it preempts."""
    expected = [greedy(oracle, prompt) for prompt in PROMPTS]
    check_in_company(folder, expected)
    return expected


def check_in_company(folder: Path, expected: list[list[int]], **options: Any) -> None:
    """An eager engine gives the expected tokens in chunks, and where it preempts. options: further ones of `LLM`."""
    chunked, _ = generated(folder, mode="eager", max_num_seqs=2, max_num_batched_tokens=7, **options)
    assert chunked == expected
    few_blocks = {"num_blocks": 24, "block_size": 4}
    preempted, metrics = generated(folder, mode="eager", max_num_seqs=5, async_scheduling=True, **few_blocks, **options)
    assert preempted == expected
    assert metrics["preemptions"] > 0
    if "speculative_config" in options:
        assert metrics["draft_tokens"] > 0
