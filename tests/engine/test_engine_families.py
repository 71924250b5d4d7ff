"""Every model family through the whole engine: log-probabilities of prompts and of generated tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# `make test-all` runs every case.
pytestmark = pytest.mark.product(one_in=7)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
CASES = {
    "llama, llama3 rope, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral, window of 8": ("mistral", {"sliding_window": 8, "vocab_size": 257}),
    "qwen2, yarn, tied": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2, windows from layer 1 on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, linear rope": ("qwen3", {"rope_parameters": LINEAR, "vocab_size": 333}),
}
PROMPT_LENS = (1, 5, 33, 70)
OUTPUT_LEN = 10


# Passes are verified on graphs of every family: of compiled engines a few are drawn.
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.product(one_in=1000))])
@pytest.mark.parametrize("name", CASES)
def test_logprobs_equal_transformers(name: str, mode: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    # Of five, three are traced.
    oracle: Any = make_checkpoint(tmp_path, family, num_hidden_layers=2 if mode == "eager" else 5, **overrides)
    vocab_size = oracle.config.vocab_size
    generator = random.Random(0)
    prompts = [[generator.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENS]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=3, prompt_logprobs=0, detokenize=False)
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "max_model_len": 128}
    with LLM(tmp_path, device="cpu", mode=mode, progress=False, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    # In float64: with five layers, those of transformers in float32 can be further from it than the bound below.
    oracle.double()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        ids = prompt + list(completion.token_ids)
        assert len(completion.token_ids) == OUTPUT_LEN
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        expected_TV = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(entries) == len(ids) - 1
        for position, entry in enumerate(entries, start=1):
            assert entry is not None
            for token_id, logprob in entry.items():
                assert logprob.logprob == pytest.approx(expected_TV[position - 1, token_id].item(), abs=2e-4)
        generated_TV = expected_TV[len(prompt) - 1 : -1]
        assert generated_TV.argmax(-1).tolist() == list(completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(generated_TV.max(-1).values.sum().item(), abs=1e-3)
