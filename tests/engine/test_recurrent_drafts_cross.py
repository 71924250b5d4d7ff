"""Random requests on models with recurrences or MTP layers have equal outputs with drafts of any kind and without."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from async_engines import run
from families import family, write_checkpoint
from mtp_layers import DEEPSEEK, ERNIE, GLM, MIMO, QWEN_NEXT, QWEN_VISION, write_mtp_checkpoint
from oracle_drafts import Oracle
from scripted_drafts import AnyLength
from token_masks import ByLastToken

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.features import registry
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, MOST_DRAFTS, NUM_REQUESTS = 4096, 3, 12
# Few tokens a step, so that prompts come in chunks beside drafts.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "dtype": "float32",
    "tokenizer": str(BUNDLED_MODEL_PATH),
    "max_model_len": 160,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "block_size": 4,
}
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 2, "maxItems": 6})
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "(ab|c){3,9}"}},
    {"structured_outputs": {"choice": ["return None", "return x", "import os"]}},
    {"token_mask": ByLastToken(VOCABULARY), "ignore_eos": True},
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.6, "bad_words": ["e"]},
]
# The first two have recurrences too.
MTP_LAYERS = {"qwen3_5": QWEN_VISION, "qwen3_next": QWEN_NEXT, "mimo": MIMO, "glm4_moe": GLM, "ernie": ERNIE}
MTP_LAYERS |= {"deepseek_v3": DEEPSEEK}
RECURRENT = ("qwen3_5", "falcon_h1", "kimi_linear", "nemotron_h", "lfm2")
MODELS = {"ngram": RECURRENT, "oracle": RECURRENT, "mtp": (*MTP_LAYERS,), "mtp, any number": (*MTP_LAYERS,)}
CASES = [
    (kind, name, seed)
    for kind, names in MODELS.items()
    for name in names
    for seed in range(4 if name == "qwen3_5" else 2)
]


class SeldomRests(AnyLength):
    """Lets the head rest so rarely that some requests have drafts, whatever runs in which step."""

    share_at_rest = 0.01


def requests(draw: random.Random, letters: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters. Logits favour `letters`, so text repeats itself and contains stop strings.

    Some drafts for the last request are right, and it alone needs more blocks than an engine with few has.
    """
    shared = [[draw.choice(letters) for _ in range(80)] for _ in range(2)]
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        own = [draw.choice(letters) for _ in range(draw.randint(1, 20))]
        prompts.append((draw.choice([[], [], [], *shared]) if number else shared[0]) + own)
        given = {"seed": number, "max_tokens": draw.choice([3, 30, 60]), **draw.choice(SAMPLING)}
        given |= {"n": draw.choice([1, 1, 2, 3])} if given["temperature"] else {}
        if draw.random() < 0.3:
            given |= draw.choice(FORMS)
        else:
            given |= {"logit_bias": dict.fromkeys(letters, 40.0), "ignore_eos": True}
        if draw.random() < 0.4:
            given |= {"stop": draw.choice(["ea", "b", "eb a"]), "include_stop_str_in_output": draw.random() < 0.5}
        if draw.random() < 0.2:
            given |= {"stop_token_ids": [draw.choice(letters)], "min_tokens": draw.randint(0, given["max_tokens"])}
        if draw.random() < 0.2:
            given |= {"logprobs": 1}
        params.append(SamplingParams(**given))
    alike: dict[str, Any] = {"n": 4, "temperature": 0.9, "allowed_token_ids": letters[:1], "ignore_eos": True}
    params.append(SamplingParams(seed=NUM_REQUESTS, max_tokens=60, **alike))
    return [*prompts, letters[:1] * 20], params


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, case = tmp_path_factory.mktemp("model"), MTP_LAYERS.get(request.param)
    base = family(request.param) if case is None else case.family
    base = replace(base, changes={**base.changes, "vocab_size": VOCABULARY, "eos_token_id": 0})
    if case is None:
        write_checkpoint(made, base)
    else:
        write_mtp_checkpoint(made, replace(case, family=base))
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), progress=False, num_blocks=300, **ENGINE) as llm:
        yield llm


async def outputs_of(
    engine: AsyncLLM, prompts: list[list[int]], params: list[SamplingParams], draw: random.Random
) -> list[tuple[RequestOutput | None, bool]]:
    """Return the last output of each request, and whether it was aborted. Requests come and are aborted at random.

    The last one is not aborted.
    """

    async def one(prompt: list[int], each: SamplingParams, arrival: int, patience: int | None) -> Any:
        for _ in range(arrival):
            await asyncio.sleep(0.001)
        last = None
        async with aclosing(engine.generate({"prompt_token_ids": prompt}, each)) as outputs:
            async for output in outputs:
                last, patience = output, patience and patience - 1
                if patience == 0:
                    break
        return last, last is None or not last.finished

    plans = [(draw.randrange(30), draw.choice([None, None, None, 1, 2, 5])) for _ in prompts[:-1]]
    plans.append((draw.randrange(30), None))
    return await asyncio.gather(
        *(one(prompt, each, *plan) for prompt, each, plan in zip(prompts, params, plans, strict=True))
    )


def check(found: RequestOutput, expected: RequestOutput, *, aborted: bool) -> None:
    for got, want in zip(found.outputs, expected.outputs, strict=not aborted):
        assert list(got.token_ids) == list(want.token_ids)[: len(got.token_ids)]
        if not aborted:
            assert len(got.token_ids) == len(want.token_ids)
            assert (got.text, got.finish_reason, got.stop_reason) == (want.text, want.finish_reason, want.stop_reason)
            for token, row, other in zip(got.token_ids, got.logprobs or (), want.logprobs or (), strict=False):
                assert row[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.product(one_in=1000, each=("kind",))
@pytest.mark.parametrize(("kind", "folder", "seed"), CASES, indirect=["folder"])
def test_drafts_change_no_output(
    kind: str, seed: int, folder: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"{kind} {seed}")
    letters = plain.get_tokenizer().encode("e a b")
    prompts, params = requests(draw, letters)
    expected = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    drafts: dict[str, Any] = {"method": "mtp" if "mtp" in kind else "ngram", "num_speculative_tokens": MOST_DRAFTS}
    if kind == "oracle":
        oracle = Oracle(range(MOST_DRAFTS + 1))
        oracle.sequences = [
            prompt + list(each.token_ids)
            for prompt, output in zip(prompts, expected, strict=True)
            for each in output.outputs
        ]
        monkeypatch.setattr(registry, "drafting", oracle.features)
    if kind == "mtp, any number":
        monkeypatch.setattr(registry, "DraftLength", SeldomRests)
        drafts |= {"enable_adaptive_verification": True}
    if drafts["method"] == "ngram":
        drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {"num_blocks": 44 if seed % 2 else 300, "async_scheduling": draw.random() < 0.5}
    if plain.config.model.recurrences is not None:
        options |= {"num_state_snapshots": draw.choice([2, 20])}

    async def main() -> tuple[list[tuple[RequestOutput | None, bool]], dict[str, Any]]:
        engine = AsyncLLM(str(folder), core="in_process", speculative_config=drafts, **ENGINE | options)
        try:
            found = await outputs_of(engine, prompts, params, draw)
            for _ in range(2):  # the second begins with a snapshot of the first
                check_all(await outputs_of(engine, prompts[:1], params[:1], draw), expected[:1])
            return found, await engine.metrics()
        finally:
            await engine.shutdown()

    found, metrics = run(main())
    check_all(found, expected)
    assert any(aborted for _, aborted in found)
    assert metrics["draft_tokens"] > metrics["accepted_tokens"]
    assert "mtp" in kind or metrics["accepted_tokens"] > 0  # drafts of a random layer are rarely right
    assert seed % 2 == 0 or metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0


def check_all(found: list[tuple[RequestOutput | None, bool]], expected: list[RequestOutput]) -> None:
    for (output, aborted), want in zip(found, expected, strict=True):
        if output is not None:
            check(output, want, aborted=aborted)
