"""Drafts on a GPU change no token, in every mode, and a step with drafts is as few launches as one without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import LINEARS, assert_is_of, make_adapter, merged
from checkpoints import make_checkpoint, write_first_layers

from compiled_engine import LLM, LoRARequest, SamplingParams
from compiled_engine.frontend.outputs import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

# Few tokens a step, so that prompts come in chunks.
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_blocks": 48,
}
# So that requests are preempted.
FEW_BLOCKS: dict[str, Any] = {"num_blocks": 20}
ACTIVITIES = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
# Tests side by side have a core each: engines compile in this process.
HERE: dict[str, Any] = {"compile_workers": 0}
COMPILED: dict[str, Any] = HERE | {"mode": "compiled"}
GRAPHED: dict[str, Any] = HERE | {"mode": "graphed"}
MODES: dict[str, dict[str, Any]] = {
    "graphed": GRAPHED,
    "graphed, one step in flight": GRAPHED | {"async_scheduling": False},
    "decodes alone": COMPILED | {"graph_mode": "full_decode_only"},
    "piecewise": COMPILED | {"graph_mode": "piecewise"},
    "full and piecewise": COMPILED | {"graph_mode": "full_and_piecewise"},
    "compiled": COMPILED | {"graph_mode": "none"},
    "eager": {"mode": "eager", "graph_mode": "none"},
    "eager, in torch": {"mode": "eager", "graph_mode": "none", "attention_backend": "torch"},
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.3},
    {"temperature": 0.8, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.5, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0.6, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 1},
    {"temperature": 0, "bad_words": ["return", " 1"]},
    {"temperature": 0, "logit_bias": {100: 3.0, 7: -5.0}},
    {"temperature": 0, "disable_spec_decode": True},
]
ENDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"stop": ["\n", "e "]},
    {"stop_token_ids": [*range(0, 4000, 40)], "min_tokens": 5},
]


def ngram(num_drafts: int, longest: int = 3, **more: Any) -> dict[str, Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": longest}
    return {"speculative_config": drafts | {"prompt_lookup_min": 1} | more}


def draft_model(path: Path, num_drafts: int, **more: Any) -> dict[str, Any]:
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts | more}


@pytest.fixture(scope="module")
def text(bundled_model_path: Path) -> str:
    return (bundled_model_path / "held_out.txt").read_text()


def workload(text: str) -> tuple[list[str], list[SamplingParams]]:
    """More requests than run at a time, of all kinds; some repeat themselves, and some share a prefix."""
    prompts, params = [], []
    for number in range(33):
        start, times = (number * 997) % 20_000 if number % 4 else 300, 1 + 2 * (number % 3)
        prompts.append((text[start : start + 20 + 7 * (number % 9)] * times)[:300])
        params.append(
            SamplingParams(
                seed=number,
                max_tokens=20 + (number * 13) % 80,
                truncate_prompt_tokens=150,
                **SAMPLING[number % len(SAMPLING)],
                **ENDS[number % len(ENDS)],
            )
        )
    return prompts, params


def results(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (tuple(each.token_ids), each.text, each.finish_reason, each.stop_reason)
        for output in outputs
        for each in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(text: str) -> Iterator[list[RequestOutput]]:
    prompts, params = workload(text)
    with LLM(**ENGINE | MODES["eager"]) as llm:
        yield llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.product(one_in=100, each=("mode",))
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize("mode", MODES)
def test_ngram_drafts_change_no_token(mode: str, num_drafts: int, text: str, expected: list[RequestOutput]) -> None:
    prompts, params = workload(text)
    with LLM(**ENGINE | FEW_BLOCKS | MODES[mode], **ngram(num_drafts)) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.core.check_integrity()
        metrics = llm.metrics()
    assert results(found) == results(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            for row, wanted in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in wanted.items()}, abs=1e-3
                )
    assert metrics["preemptions"] > 0
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)


@pytest.fixture(scope="module")
def first_layers(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often right, and often wrong."""
    return write_first_layers(bundled_model_path, tmp_path_factory.mktemp("draft"), 5)


@pytest.mark.product(one_in=100, each=("mode",))
@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_drafts_of_a_model_change_no_token(
    mode: str, num_drafts: int, text: str, first_layers: Path, expected: list[RequestOutput]
) -> None:
    prompts, params = workload(text)
    with LLM(**ENGINE | FEW_BLOCKS | MODES[mode], **draft_model(first_layers, num_drafts)) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.core.check_integrity()
        metrics = llm.metrics()
    assert results(found) == results(expected)
    assert metrics["preemptions"] > 0
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["graphed", "piecewise", "eager"])
def test_a_model_that_drafts_for_itself_is_always_right(mode: str, text: str, bundled_model_path: Path) -> None:
    """With chunks of prompts and cached prefixes; of each prompt, one request is greedy."""
    prompts = [text[40 * i : 40 * i + 30 + 12 * i] for i in range(8) for _ in range(2)]
    params = [SamplingParams(seed=i, max_tokens=15 + i, temperature=0.8 * (i % 2)) for i in range(len(prompts))]
    with LLM(**ENGINE | {"num_blocks": 200} | MODES[mode], **draft_model(bundled_model_path, 4)) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 100
    assert metrics["prefix_hits"] > 0


def test_the_passes_of_a_draft_model_are_one_launch(bundled_model_path: Path) -> None:
    """A step of decodes is two: the drafts, and their verification."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(**ENGINE | HERE, **draft_model(bundled_model_path, 3)) as llm:
        llm.generate(["def f(x):"] * 3, params, use_tqdm=False)
        before = llm.metrics()
        with torch.profiler.profile(activities=ACTIVITIES) as profile:
            llm.generate(["def g(x):"] * 3, params, use_tqdm=False)
        after = llm.metrics()
    launches = [event.name for event in profile.events() if event.name == "cudaGraphLaunch"]
    steps = after["steps"] - before["steps"]
    assert steps < 40
    assert after["graph_bytes_predicted"] > 0
    # The step of the prompts alone drafts nothing.
    assert len(launches) == after["graph_replays"] - before["graph_replays"] == 2 * steps - 1
    drafted = [
        sum(count for name, count in metrics["graph_replays_by_key"].items() if name.startswith("draft-3 "))
        for metrics in (before, after)
    ]
    assert drafted[1] - drafted[0] == steps - 1


def test_drafts_of_an_8_bit_cache(text: str) -> None:
    prompts, params = workload(text)
    found = []
    for config in ({}, ngram(3)):
        with LLM(**ENGINE | HERE, kv_cache_dtype="int8", **config) as llm:
            found.append(results(llm.generate(prompts, params, use_tqdm=False)))
            metrics = llm.metrics()
    assert found[0] == found[1]
    assert metrics["accepted_tokens"] > 0


def test_drafts_beside_adapters(tmp_path: Path) -> None:
    """Each request but the first has an adapter of its own, one of them of the output projection too. Without drafts
    each gets what its merged weights would give it."""
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=2)
    targets = {1: LINEARS, 8: (*LINEARS, "lm_head"), 64: LINEARS}
    paths = [make_adapter(tmp_path / str(rank), base, rank, targets=targets[rank], seed=rank) for rank in targets]
    requests = [None, *(LoRARequest(path.name, number, path) for number, path in enumerate(paths, start=1))]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 27] * 3, [7] * 20, list(range(1, 34)), [90, 2] * 70)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    # In one step the prompts are too many tokens for a graph that ends at logits.
    adapters = ENGINE | HERE | {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "max_num_batched_tokens": 256}
    found = []
    for config in ({}, ngram(3)):
        with LLM(tmp_path / "base", **adapters, **config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
            found.append(results(outputs))
            if not config:
                for path, output in zip([None, *paths], outputs, strict=True):
                    assert_is_of(merged(tmp_path / "base", path), output)
            metrics = llm.metrics()
    assert found[0] == found[1]
    assert metrics["accepted_tokens"] > 0


def test_a_step_with_drafts_is_one_launch() -> None:
    """Of decodes, whatever is accepted."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2"
    with LLM(**ENGINE | HERE, **ngram(4)) as llm:
        llm.generate([prompt] * 3, params, use_tqdm=False)
        before = llm.metrics()
        with torch.profiler.profile(activities=ACTIVITIES) as profile:
            llm.generate([prompt + " "] * 3, params, use_tqdm=False)
        after = llm.metrics()
    launches = [event.name for event in profile.events() if event.name == "cudaGraphLaunch"]
    steps = after["steps"] - before["steps"]
    assert after["accepted_tokens"] > before["accepted_tokens"]
    assert after["graph_replays"] - before["graph_replays"] == steps
    assert len(launches) == steps
    by_key = after["graph_replays_by_key"]
    assert sum(count for name, count in by_key.items() if name.startswith("verify-5")) > steps


def test_synthetic_acceptance_reaches_its_length() -> None:
    """With drafts that are always found, since the prompt repeats itself and so does what is emitted."""
    length, params = 2.8, SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    config = ngram(3, rejection_sample_method="synthetic", synthetic_acceptance_length=length)
    with LLM(**ENGINE | HERE | {"max_model_len": 1024, "num_blocks": 80}, **config) as llm:
        llm.generate([{"prompt_token_ids": [5, 6] * 20}], params, use_tqdm=False)
        metrics = llm.metrics()
    drafted = metrics["drafted_requests"]
    assert drafted > 100
    by_position = list(metrics["accepted_by_position"].values())
    assert by_position[0] >= drafted - 1  # the last step may have room for fewer
    assert 0.65 < by_position[1] / drafted < 0.95
    assert by_position[2] == 0


def test_penalties_and_drafts_share_a_batch(text: str) -> None:
    """Requests of one token a step are rows beside those with drafts."""
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.1 if number % 2 else 1.0)
        for number in range(6)
    ]
    prompts, found = [text[:60] * 3] * 6, []
    for config in ({}, ngram(3)):
        with LLM(**ENGINE | HERE, **config) as llm:
            found.append(results(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


def test_the_prefix_of_a_step_is_not_read_in_it(text: str) -> None:
    """Requests that get one token a step complete blocks that others, which come later, find in the cache."""
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, disable_spec_decode=True)
    found = []
    for config in ({}, ngram(3)):
        with LLM(**ENGINE | HERE, **config) as llm:
            first = llm.generate([text[:200]], plain, use_tqdm=False)[0]
            ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            prompts = [{"prompt_token_ids": ids[:length]} for length in range(17, len(ids), 16)]
            found.append(results(llm.generate(prompts, plain, use_tqdm=False)))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["graphed", pytest.param("eager", marks=pytest.mark.product(one_in=1000))])
@pytest.mark.parametrize("method", ["ngram", "draft model"])
def test_warm_up_leaves_nothing_to_compile(method: str, mode: str, bundled_model_path: Path) -> None:
    """Requests with drafts find all their kernels."""
    import triton

    compiled: list[str] = []
    drafts = ngram(3) if method == "ngram" else draft_model(bundled_model_path, 3)
    with LLM(**ENGINE | MODES[mode], **drafts) as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: compiled.append(repr)
        try:
            params = [SamplingParams(temperature=0.5, seed=seed, max_tokens=30) for seed in range(8)]
            llm.generate(["def f(x):\n    return"] * 8, params, use_tqdm=False)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
        torch.cuda.synchronize()
    assert compiled == []
