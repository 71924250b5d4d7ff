"""Latent attention on a GPU: long prompts are expanded, in chunks, beside decodes and behind a cached prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family, load_oracle, write_checkpoint
from greedy_engines import greedy
from latent_cases import round_rows

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

SHARED = [(5 * i + 3 * i * i) % 97 for i in range(300)]
# The last prompts begin as the second does: their questions have cached contexts, one short and one long enough.
PROMPTS = [
    [7, 8, 9],
    [*SHARED, *range(20, 80)],
    [(11 * i + i * i) % 97 for i in range(700)],
    [*SHARED, 1, 2, 3, 4],
    [*SHARED, *((13 * i) % 97 for i in range(290))],
]
OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 800, "num_blocks": 400}
MAX_TOKENS = 12
TOLERANCE = 3e-4
BF16_FACTOR = 2
# Mean difference in fp32 with rows of 8 bits. Elements between two codes are rounded up or down by chance.
MEAN_OF_ROUNDED = 1e-2
REAL_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CASES = {
    "steps of 1,100 tokens": {"max_num_batched_tokens": 1100},
    "chunks of 310 tokens": {"max_num_batched_tokens": 310},
    "graphs with attention": {"max_num_batched_tokens": 640, "graph_mode": "full", "capture_token_sizes": (640,)},
    "eager": {"mode": "eager", "max_num_batched_tokens": 700},
    "drafts": {
        "max_num_batched_tokens": 600,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    },
}


def run(folder: Path, **options: Any) -> list[Any]:
    """Return the outputs of PROMPTS: the first two alone, so that the others find their prefix in the cache."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    compiling = {} if options.get("mode") == "eager" else {"compile_workers": 0}
    with LLM(folder, progress=False, **OPTIONS | compiling | options) as llm:
        return [output for part in (given[:2], given[2:]) for output in llm.generate(part, params, use_tqdm=False)]


def logprobs(outputs: list[Any]) -> torch.Tensor:
    """Return the log-probabilities of all generated tokens."""
    completions = [output.outputs[0] for output in outputs]
    found = [zip(completion.logprobs, completion.token_ids, strict=True) for completion in completions]
    return torch.tensor([entry[token].logprob for pairs in found for entry, token in pairs])


def logprobs_of(oracle: Any, outputs: list[Any]) -> torch.Tensor:
    """Return the log-probabilities that transformers' model gives the generated tokens."""
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logprobs_TV = oracle(torch.tensor([prompt + token_ids])).logits[0].float().log_softmax(-1)
        found.append(logprobs_TV[len(prompt) - 1 : -1].gather(1, torch.tensor(token_ids)[:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("model")
    case = family(request.param)
    oracle = write_checkpoint(folder, replace(case, changes={**case.changes, "max_position_embeddings": 1024}))
    return folder, oracle, [greedy(oracle, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, checkpoint: tuple[Path, Any, Any]) -> None:
    folder, oracle, expected = checkpoint
    outputs = run(folder, dtype="float32", **CASES[name])
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert float((logprobs(outputs) - logprobs_of(oracle, outputs)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["chunks of 310 tokens", "graphs with attention", "eager"])
def test_rows_of_8_bits(name: str, dtype: str, checkpoint: tuple[Path, Any, Any]) -> None:
    """Log-probabilities are those of transformers with rounded rows, not with exact ones."""
    folder, oracle, _ = checkpoint
    outputs = run(folder, dtype="float32", kv_cache_dtype=dtype, **CASES[name])
    rounded = load_oracle(folder, torch.float32)
    round_rows(rounded, dtype)
    found = logprobs(outputs)
    assert float((found - logprobs_of(rounded, outputs)).abs().mean()) < MEAN_OF_ROUNDED
    assert float((found - logprobs_of(oracle, outputs)).abs().mean()) > 2 * MEAN_OF_ROUNDED


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("own", "value"), [(128, 128), (192, 256)], ids=["DeepSeek-V3", "GLM-4.7-Flash"])
def test_bfloat16_in_the_sizes_of_published_models(own: int, value: int, kv_cache_dtype: str, tmp_path: Path) -> None:
    """Log-probabilities are about as far from those in fp32 as the ones of transformers in bfloat16 are."""
    sizes = REAL_SIZES | {"qk_nope_head_dim": own, "v_head_dim": value, "max_position_embeddings": 1024}
    case = family("glm4_moe_lite")
    oracle = write_checkpoint(tmp_path, replace(case, changes={**case.changes, **sizes}))
    outputs = run(tmp_path, dtype="bfloat16", max_num_batched_tokens=600, kv_cache_dtype=kv_cache_dtype)
    in_bfloat16 = load_oracle(tmp_path, torch.bfloat16)
    if kv_cache_dtype != "auto":
        round_rows(oracle, kv_cache_dtype)
        round_rows(in_bfloat16, kv_cache_dtype)
    exact, narrow = logprobs_of(oracle, outputs), logprobs_of(in_bfloat16, outputs)
    assert float((logprobs(outputs) - exact).abs().mean()) <= BF16_FACTOR * float((narrow - exact).abs().mean())
