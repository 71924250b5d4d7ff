"""Prompts with audio for tiny Whispers, whose tokens and log-probabilities are compared with transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from speech_models import FIRST_TIME, RATE, SpeechOracle, random_clip, rules_of

from compiled_engine import LLM, RequestOutput, SamplingParams

TOLERANCE = 3e-4  # of log-probabilities
COUNT = 12
# Prompts, the numbers of their clips, and the rules that their tokens follow. One prompt is computed in chunks.
PROMPTS: tuple[tuple[list[int], int, str], ...] = (
    *(
        ([2, 5, 7], 0, ""),
        ([2, 9], 1, "timestamps"),
        ([2, 5, 7], 1, ""),
        ([2, 9], 1, "text"),
        ([2, *range(50, 62)], 2, ""),
    ),
    ([2, 5, 7], 2, "timestamps"),
)


def given(ids: Sequence[int], clip: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"audio": (random_clip(clip), RATE)}}


def greedy(rules: str = "", **params: Any) -> SamplingParams:
    extra_args = {"transcription": rules} if rules else None
    return SamplingParams(ignore_eos=True, max_tokens=COUNT, extra_args=extra_args, **{"temperature": 0} | params)


def generated(llm: LLM) -> list[RequestOutput]:
    params = [greedy(rules, logprobs=0) for _, _, rules in PROMPTS]
    return llm.generate([given(ids, clip) for ids, clip, _ in PROMPTS], params, use_tqdm=False)


def check(oracle: SpeechOracle, outputs: Sequence[RequestOutput]) -> None:
    for (ids, clip, rules), output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.outputs
        allowed = rules_of(len(ids), timestamps=rules == "timestamps") if rules else ()
        tokens, logprobs = oracle.greedy(ids, random_clip(clip), COUNT, allowed)
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        found = [each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=TOLERANCE)
        assert any(token >= FIRST_TIME for token in tokens) or rules != "timestamps"


def check_twice(oracle: SpeechOracle, llm: LLM) -> None:
    """Run the prompts together, and again; each clip is encoded once."""
    for _ in range(2):
        check(oracle, generated(llm))
        assert llm.metrics()["clips_encoded"] == 3
