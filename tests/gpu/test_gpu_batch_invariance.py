"""Batch-invariant engines on a GPU: a request has the same bits in every batch, with the compiler and CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import make_checkpoint
from invariant_requests import alone, requests, together
from tokenizers import Tokenizer

from compiled_engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

COUNT, LONGEST = 20, 240
# Few tokens a step, so that prompts come in chunks, and few blocks, so that requests are preempted.
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
ENGINES: dict[str, dict[str, Any]] = {
    "graphed": {},
    "graphed with drafts": {"speculative_config": DRAFTS},
    "piecewise": {"mode": "compiled", "graph_mode": "piecewise"},
    "compiled": {"mode": "compiled", "graph_mode": "none", "async_scheduling": False},
}


class Setting(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[Any]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def setting(
    request: pytest.FixtureRequest,
    bundled_model_path: Path,
    bundled_tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Setting:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param, dtype=torch.bfloat16, **LARGE)
    ids = bundled_tokenizer.encode((bundled_model_path / "held_out.txt").read_text()[:20_000]).ids
    prompts, params = requests([each % LARGE["vocab_size"] for each in ids], COUNT, LONGEST)
    with LLM(folder, **ENGINE, skip_tokenizer_init=True, batch_invariant=True) as llm:
        expected = alone(llm, prompts, params)
    return Setting(folder, prompts, params, expected)


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_has_the_same_bits_in_every_batch(name: str, setting: Setting) -> None:
    with LLM(setting.folder, **ENGINE | ENGINES[name], skip_tokenizer_init=True, batch_invariant=True) as llm:
        for size in (64, 1, 3, 20, 33, 64):
            chosen = [(n * 7 + size) % COUNT for n in range(size)]
            if size % 2:
                llm.reset_prefix_cache()
            found = together(llm, [setting.prompts[n] for n in chosen], [setting.params[n] for n in chosen])
            assert [n for n, result in zip(chosen, found, strict=True) if result != setting.expected[n]] == [], size
        metrics = llm.metrics()
        llm.core.check_integrity()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0


def test_the_engine_without_the_mode_has_other_bits_in_some_batch(setting: Setting) -> None:
    with LLM(setting.folder, **ENGINE, skip_tokenizer_init=True) as llm:
        expected = alone(llm, setting.prompts, setting.params)
        llm.reset_prefix_cache()
        assert together(llm, setting.prompts, setting.params) != expected


@pytest.mark.parametrize(
    "options",
    [
        *({"kv_cache_dtype": name} for name in ("fp8", "int8")),
        *({"quantization": name} for name in ("fp8", "fp8_block")),
    ],
    ids=lambda options: "-".join(*options.items()),
)
def test_eight_bits_have_the_same_bits_in_every_batch(options: dict[str, str], setting: Setting) -> None:
    chosen = [n % COUNT for n in range(64)]
    with LLM(setting.folder, **ENGINE | options, skip_tokenizer_init=True, batch_invariant=True) as llm:
        expected = alone(llm, setting.prompts, setting.params)
        for _ in range(2):
            found = together(llm, [setting.prompts[n] for n in chosen], [setting.params[n] for n in chosen])
            assert [n for n, result in zip(chosen, found, strict=True) if result != expected[n]] == []


def test_four_bits_are_refused_by_name(setting: Setting) -> None:
    with pytest.raises(
        ValueError, match=r"batch_invariant is True, but .* is quantised, and its kernels are chosen by"
    ):
        LLM(setting.folder, **ENGINE, quantization="int4", skip_tokenizer_init=True, batch_invariant=True)
