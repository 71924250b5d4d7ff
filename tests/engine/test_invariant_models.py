"""Batch-invariant engines of models with experts and recurrences: a request has the same bits in every batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from invariant_requests import alone, requests, together

from compiled_engine import LLM, SamplingParams

COUNT, LONGEST = 10, 70
# Few tokens a step, so that prompts come in chunks, and few blocks, so that requests are preempted.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "compile_workers": 0,
    "skip_tokenizer_init": True,
    "batch_invariant": True,
    "max_model_len": 112,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 24,
    "block_size": 16,
    "num_blocks": 10,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# Logits that leave few tokens, so that text repeats itself and drafts are accepted.
FEW = dict.fromkeys((7, 8, 9), 40.0)
# The C++ kernel of linears takes columns in multiples of 16.
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
# Short convolutions, delta rules and states of Mamba 2; experts that are shared, and routers that the op of experts
# does not compute (glm4_moe, lfm2_moe). One family runs without --all.
# Families of which no prefix is found again in engines of these sizes, since they need snapshots of recurrences.
RECURRENT = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "falcon_h1")
RECURRENT += ("granitemoehybrid",)
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe", *RECURRENT)


Requests = tuple[list[list[int]], list[SamplingParams]]


def write_model(folder: Path, name: str) -> None:
    if name == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        make_checkpoint(folder, name, **WIDTHS, **experts, **heads)
        return
    whole = family(name)
    layers = {key: kinds[:2] for key, kinds in whole.changes.items() if key.endswith("layer_types")}
    write_checkpoint(folder, replace(whole, changes={**WIDTHS, **whole.changes, **layers}))


def wrong_in_company(llm: LLM, requests: Requests, expected: list[Any]) -> list[int]:
    """Return the requests whose bits differ from those expected when many run at once."""
    prompts, params = requests
    wrong = []
    for chosen in ([n % COUNT for n in range(16)], [0, 5] * 8):  # the latter get so many tokens that blocks run out
        found = together(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
        wrong += [n for n, result in zip(chosen, found, strict=True) if result != expected[n]]
    return wrong


def made_requests() -> Requests:
    draw = random.Random(0)
    prompts, params = requests([draw.randrange(20, 60) for _ in range(900)], COUNT, LONGEST)
    return prompts, [replace(each, logit_bias=FEW) if n % 2 else each for n, each in enumerate(params)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    """Alone or together, in chunks, after a cached prefix or a preemption, with drafts or without."""
    write_model(tmp_path, name)
    asked = made_requests()
    counted = "preemptions", "accepted_tokens", *(["prefix_hits"] if name not in RECURRENT else [])
    seen = dict.fromkeys(counted, 0)
    expected: list[Any] = []
    for options in ({}, {"speculative_config": DRAFTS}):
        with LLM(tmp_path, **ENGINE, **options) as llm:
            expected = expected or alone(llm, *asked)
            before = llm.metrics()
            assert wrong_in_company(llm, asked, expected) == []
            after = llm.metrics()
            seen = {name: count + after[name] - before[name] for name, count in seen.items()}
    assert all(seen.values()), seen


@pytest.mark.shown_by(
    "parallel/test_gpu_groups.py::test_ranks_are_added_in_their_order_whatever_the_number_of_rows",
    "engine/test_invariant_models.py::test_a_request_has_the_same_bits_in_every_batch",
)
@pytest.mark.parametrize("options", [{}, {"speculative_config": DRAFTS}], ids=["plain", "drafting"])
def test_ranks_give_a_request_the_same_bits_in_every_batch(options: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    asked = made_requests()
    with LLM(tmp_path, **ENGINE, **options, tensor_parallel_size=2) as llm:
        assert wrong_in_company(llm, asked, alone(llm, *asked)) == []
