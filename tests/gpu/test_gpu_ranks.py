"""Ranks, stages and replicas on two GPUs: tokens and log-probabilities are those of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import make_adapter
from checkpoints import make_checkpoint

from compiled_engine import LLM, LoRARequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("exact_float32"),
]

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 130 for j in range(9 + 13 * i)]} for i in range(5)]
GREEDY: dict[str, Any] = {"temperature": 0}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
# Top-p without a top-k takes whole rows of logits.
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}


@dataclass(frozen=True)
class Case:
    """both: options on one GPU as well. vocab_size: two ranks divide an even one; each has the whole of an odd one.
    worst: the largest difference of a prompt's log-probability, larger where scales of 8 bits round otherwise.
    draft_model: the model drafts for itself."""

    two: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    vocab_size: int = 132
    worst: float = 3e-4
    adapters: bool = False
    draft_model: bool = False


CASES = {
    "ranks": Case(TWO_RANKS),
    "ranks, sampled": Case(TWO_RANKS, sampling=SAMPLED),
    "ranks, undivided vocabulary, sampled": Case(TWO_RANKS, sampling=SAMPLED, vocab_size=131),
    "ranks, divided norms": Case(TWO_RANKS | {"sequence_parallel": True}),
    "ranks, 8-bit cache": Case(TWO_RANKS, {"kv_cache_dtype": "int8"}, worst=0.05),
    "ranks, adapters": Case(TWO_RANKS, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}, adapters=True),
    "ranks, drafts": Case(TWO_RANKS, {"speculative_config": NGRAM}, sampling=SAMPLED),
    "ranks, draft model": Case(TWO_RANKS, draft_model=True),
    "stages": Case({"pipeline_parallel_size": 2}),
    "replicas": Case({"data_parallel_size": 2}, sampling=SAMPLED),
}


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_compute_what_one_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    sizes = SIZES | {"num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": case.vocab_size}
    model = make_checkpoint(tmp_path / "model", "qwen3", **sizes)
    given: dict[str, Any] = {}
    if case.adapters:
        paths = [make_adapter(tmp_path / str(rank), model, rank, seed=rank, size=0.5) for rank in (4, 16)]
        one, other = (LoRARequest(path.name, number, path) for number, path in enumerate(paths, start=1))
        given["lora_request"] = [None, one, other, None, one]
    options = {"device": "cuda", "dtype": "float32", "progress": False, "max_model_len": 256, "num_blocks": 256}
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0, **case.sampling)
    both = case.both
    if case.draft_model:
        both = both | {
            "speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
        }
    found = []
    for more in ({}, case.two):
        with LLM(tmp_path / "model", **options, **both, **more) as llm:
            found.append(llm.generate(PROMPTS, params, use_tqdm=False, **given))
    for one_gpu, two_gpus, prompt in zip(*found, PROMPTS, strict=True):
        assert one_gpu.outputs[0].token_ids == two_gpus.outputs[0].token_ids
        for x, y, token in zip(
            one_gpu.prompt_logprobs[1:], two_gpus.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True
        ):
            assert abs(x[token].logprob - y[token].logprob) <= case.worst
