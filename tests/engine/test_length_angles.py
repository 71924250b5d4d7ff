"""Rotary angles that depend on a request's length, against transformers' `generate`, within the border and across it.

transformers computes a LongRoPE request again when it grows over the border (Phi-3), and lets keys keep their angles
with dynamic scaling.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import make_checkpoint
from packaging.version import Version

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

BORDER, OUTPUT_LEN, TOLERANCE = 24, 10, 3e-4


def longrope(num_pairs: int, **more: Any) -> dict[str, Any]:
    short, long = [1.0 + pair / 8 for pair in range(num_pairs)], [2.0 + pair for pair in range(num_pairs)]
    rope = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": short, "long_factor": long, **more}
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": BORDER,
        "max_position_embeddings": 96,
    }


DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
    "max_position_embeddings": BORDER,
}
# Two ranks divide them, and the heads of phi3 are hidden_size / num_attention_heads.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 132}
# Family, its configuration, and whose code runs.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("phi3", longrope(8), "textbook"),
    "dynamic": ("llama", DYNAMIC, "textbook"),
    "partial longrope of transformers": ("phi3", longrope(4, partial_rotary_factor=0.5), "transformers"),
    "dynamic of transformers": ("qwen2", DYNAMIC, "transformers"),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "block_size": 8,
}
# Within the border, growing over it, up to it, over it, and computed in chunks.
PROMPT_LENS = (5, BORDER - 6, BORDER, BORDER + 1, 40, 70)
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=3, detokenize=False, ignore_eos=True)


def prompts_of(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENS) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def expected(oracle: Any, prompt: list[int], count: int = OUTPUT_LEN) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of transformers' `generate`, and the log-probabilities [T, V] at each.

    LongRoPE has no cache: earlier versions of transformers do not compute all tokens again at the border.
    """
    fresh = copy.deepcopy(oracle)  # rotary modules remember the longest sequence that they have seen
    result = fresh.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        use_cache=fresh.config.rope_parameters["rope_type"] == "dynamic",
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float().log_softmax(-1)


def check(oracle: Any, prompts: list[list[int]], outputs: list[Any], count: int = OUTPUT_LEN) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, table_TV = expected(oracle, prompt, count)
        completion = output.outputs[0]
        assert list(completion.token_ids) == tokens, len(prompt)
        for logprobs_V, entry in zip(table_TV, completion.logprobs, strict=True):
            for token, found in entry.items():
                assert abs(found.logprob - logprobs_V[token].item()) <= TOLERANCE


@pytest.fixture(scope="module", params=CASES)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if CASES[found][2] == "transformers" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("rotary modules of earlier versions of transformers take no frequencies by token")
    return found


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def oracle(kind: str, folder: Path) -> Any:
    family, overrides, _ = CASES[kind]
    return make_checkpoint(folder, family, **SIZES | overrides)


@pytest.fixture(scope="module")
def options(kind: str) -> dict[str, Any]:
    return OPTIONS | {"model_impl": CASES[kind][2]}


@pytest.fixture(scope="module")
def draft_folder(kind: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model itself, whose drafts are right, unless the textbook lacks it."""
    if CASES[kind][2] == "textbook":
        return folder
    other = tmp_path_factory.mktemp("draft")
    make_checkpoint(other, "llama", **SIZES | DYNAMIC)
    return other


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.product(one_in=4))])
def test_tokens_are_those_of_transformers(mode: str, oracle: Any, folder: Path, options: dict[str, Any]) -> None:
    """Prompts are computed in chunks and packed, and once more with prefixes from the cache."""
    prompts = prompts_of(oracle.config.vocab_size)
    options = options | {"mode": mode} | ({"compile_ranges": ()} if mode == "compiled" else {})
    with LLM(folder, **options) as llm:
        for _ in range(2):
            check(oracle, prompts, generated(llm, prompts))
        assert llm.metrics()["prefix_hits"] > 0


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize(
    "more",
    [
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}, "async_scheduling": True},
    ],
    ids=str,
)
def test_other_ways_to_run_give_the_same_tokens(
    more: dict[str, Any], oracle: Any, folder: Path, options: dict[str, Any], draft_folder: Path
) -> None:
    """A step before the results of the last one, and drafts across the border."""
    prompts = prompts_of(oracle.config.vocab_size)
    if (drafts := more.get("speculative_config", {})).get("method") == "draft_model":
        more = {**more, "speculative_config": drafts | {"model": str(draft_folder)}}
    with LLM(folder, mode="eager", **options | more) as llm:
        check(oracle, prompts, generated(llm, prompts))


@pytest.mark.parametrize("kind", ["longrope"], indirect=True)
def test_two_ranks_give_the_same_tokens(oracle: Any, folder: Path, options: dict[str, Any]) -> None:
    prompts = prompts_of(oracle.config.vocab_size)
    with LLM(folder, mode="eager", **options, tensor_parallel_size=2) as llm:
        check(oracle, prompts, generated(llm, prompts))


def test_preempted_requests_keep_their_angles(oracle: Any, folder: Path, options: dict[str, Any]) -> None:
    prompts = prompts_of(oracle.config.vocab_size, (5, BORDER - 6, BORDER - 1, BORDER + 1, BORDER + 3))
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, detokenize=False)
    with LLM(folder, mode="eager", **options | {"num_blocks": 12, "async_scheduling": True}) as llm:
        check(oracle, prompts, generated(llm, prompts, params), 24)
        assert llm.metrics()["preemptions"] > 0


def test_requests_with_other_angles_share_no_keys(oracle: Any, folder: Path, options: dict[str, Any]) -> None:
    """The beginnings of a long prompt are prompts themselves, within the border and beyond it."""
    (long,) = prompts_of(oracle.config.vocab_size, (70,))
    prompts = [long, long[:60], long[:48], long[: BORDER - 2]]
    with LLM(folder, mode="eager", **options) as llm:
        for prompt in [*prompts, *prompts[::-1]]:
            check(oracle, [prompt], generated(llm, [prompt]))


def test_an_output_that_outgrows_its_angles_ends_where_it_is_told_to(
    oracle: Any, folder: Path, options: dict[str, Any]
) -> None:
    """The limit on length may be just before the border, at it and behind it."""
    (prompt,) = prompts_of(oracle.config.vocab_size, (BORDER - 2,))
    with LLM(folder, mode="eager", **options) as llm:
        for count in (1, 2, 3, 4):
            params = SamplingParams(temperature=0, max_tokens=count, logprobs=1, detokenize=False)
            check(oracle, [prompt], generated(llm, [prompt], params), count)


def test_without_requests_beyond_the_border_the_model_has_fixed_angles(
    oracle: Any, folder: Path, options: dict[str, Any]
) -> None:
    prompts = prompts_of(oracle.config.vocab_size, (5, 11))
    with LLM(folder, mode="eager", **options | {"max_model_len": BORDER}) as llm:
        assert llm.config.model.length_angles is None
        check(oracle, prompts, generated(llm, prompts))
