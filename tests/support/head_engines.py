"""Engines with draft heads: their options, requests that meet all that may befall one, and the drafts of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from small_engines import CHUNKED

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.features.speculation.draft_head import DraftHead
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.sampling.params import SamplingParams

# Few blocks, so that requests are preempted.
ENGINE = CHUNKED | {"num_blocks": 36, "tokenizer": str(BUNDLED_MODEL_PATH)}
VOCAB = 131
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.1},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.7, "logit_bias": {100: 3.0}, "allowed_token_ids": list(range(0, VOCAB, 2)), "min_tokens": 9},
]
PENALISED: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2}


def prompts(least: int = 5) -> list[dict[str, list[int]]]:
    """Return prompts, some longer than a step, and each twice, so that the second finds the first's blocks.

    least: tokens of the shortest.
    """
    texts = [[(7 * i + 3 * j * j) % VOCAB for j in range(least + 9 * i)] for i in range(6)]
    return [{"prompt_token_ids": text} for text in texts for _ in range(2)]


def generate(llm: LLM, least: int = 5, **sampling: Any) -> list[list[int]]:
    """Return the tokens of twelve requests that are sampled alike."""
    return generate_each(llm, [sampling], least)


def generate_each(llm: LLM, samplings: Sequence[dict[str, Any]], least: int = 5) -> list[list[int]]:
    """Return the tokens of twelve requests, which take these kinds of sampling in turn."""
    params = [
        SamplingParams(seed=i, max_tokens=14 + i, ignore_eos=True, detokenize=False, **samplings[i % len(samplings)])
        for i in range(12)
    ]
    outputs = llm.generate(prompts(least), params, use_tqdm=False)
    llm.core.check_integrity()
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Return the drafts of all heads from now on, by the tokens behind which they were made.

    Behind the same tokens, drafts must be the same.
    """
    seen: dict[tuple[int, ...], list[int]] = {}
    receive = DraftHead.receive

    def record(self: DraftHead, batch: InputBatch, hidden_wanted: bool) -> None:
        drafting, states = self._drafting, self._states
        assert drafting is not None
        assert states.ahead_SK is not None
        receive(self, batch, hidden_wanted)
        for place, row in enumerate(drafting.rows.tolist()):
            known = tuple(states.all_token_ids(row)[: int(states.num_computed_S[row]) + 1].tolist())
            room = sum(count > place for count in drafting.num_drafting)
            drafts = states.ahead_SK[row, :room].tolist()
            assert seen.setdefault(known, drafts)[:room] == drafts[: len(seen[known])]

    monkeypatch.setattr(DraftHead, "receive", record)
    return seen
