"""Batch-invariant engines on a GPU: a request has the same bits in every batch, with the compiler and CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from invariant_requests import alone, requests, together

from compiled_engine import LLM
from compiled_engine.frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

COUNT, LONGEST = 20, 240
# Few tokens a step, so that prompts come in chunks.
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "progress": False,
    "compile_workers": 0,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 192,
    "block_size": 16,
    "num_blocks": 120,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# Sizes of heads and tiles that models have: linears of several parts, and of one.
LARGE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
EIGHT_BITS = {"quantization": "fp8_block", "kv_cache_dtype": "fp8"}


def test_a_request_has_the_same_bits_in_every_batch(
    bundled_model_path: Path, bundled_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Alone or together, in chunks or after a cached prefix, with drafts or without, and with codes of eight bits."""
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **LARGE)
    ids = bundled_tokenizer.encode((bundled_model_path / "held_out.txt").read_text()[:20_000])
    check(tmp_path, ids, (("bf16", {}), ("bf16", {"speculative_config": DRAFTS}), ("fp8", EIGHT_BITS)))


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": DRAFTS}], ids=["plain", "drafting"])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h"]
)
def test_models_with_experts_and_recurrences_too(name: str, drafts: dict[str, Any], tmp_path: Path) -> None:
    if name == "qwen3_moe":
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
        make_checkpoint(tmp_path, name, dtype=torch.bfloat16, **LARGE, **experts)
    else:
        write_checkpoint(tmp_path, family(name), torch.bfloat16)
    ids = random.Random(0).choices(range(20, 60), k=4000)
    check(tmp_path, ids, (("bf16", drafts), *([("fp8", EIGHT_BITS | drafts)] if name == "qwen3_moe" else [])))


def check(folder: Path, ids: list[int], ways: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Assert that requests have the same bits in every batch. ways: weights, and options of an engine.

    Engines with the same weights have the same bits.
    """
    prompts, params = requests([each % LARGE["vocab_size"] for each in ids], COUNT, LONGEST)
    expected: dict[str, list[Any]] = {}
    for weights, options in ways:
        with LLM(folder, **ENGINE | options, skip_tokenizer_init=True, batch_invariant=True) as llm:
            if weights not in expected:
                expected[weights] = alone(llm, prompts, params)
            for size in (64, 3, 33):
                chosen = [(n * 7 + size) % COUNT for n in range(size)]
                found = together(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
                wrong = [n for n, result in zip(chosen, found, strict=True) if result != expected[weights][n]]
                assert wrong == [], (weights, size)
