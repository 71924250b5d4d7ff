"""A request that another core has begun goes on with the tokens, log-probabilities and end that it would have had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from async_engines import ENGINE
from msgspec import structs
from small_engines import PROMPTS

from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.features.prompt_logprobs.extras import resumed, rows_in
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs

KINDS: dict[str, dict[str, Any]] = {
    "greedy, with log-probabilities": {"temperature": 0, "logprobs": 2},
    "seeded, with filters": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 0.8, "seed": 1, "presence_penalty": 1.0, "frequency_penalty": 0.3, "min_tokens": 8},
    "log-probabilities of the prompt": {"temperature": 0, "prompt_logprobs": 1},
    "a grammar": {"temperature": 1, "seed": 7, "structured_outputs": StructuredOutputs(regex="([a-c]{3} ){9}")},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


def run(llm: LLM, request: EngineRequest) -> list[EngineOutput]:
    core = llm.core
    core.add(request)
    found: list[EngineOutput] = []
    while core.has_unfinished():
        found += core.step()
    core.check_integrity()
    return found


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def logprobs(outputs: list[EngineOutput]) -> list[float]:
    return [value for output in outputs for row in output.logprobs or () for value in row.logprobs]


@pytest.mark.parametrize("name", KINDS)
def test_it_ends_as_it_would_have(name: str, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, **KINDS[name])
    (prepared,) = llm._prepare(parse_prompts(PROMPTS[1]), params)
    (request,) = prepared.engine_requests
    whole = run(llm, request)
    said, per_token = tokens(whole), len(logprobs(whole)) // 12
    num_prompt = len(request.prompt_token_ids)
    for known in (1, 9, len(said) - 1):
        llm.reset_prefix_cache()
        begun = structs.replace(
            request,
            request_id=f"known-{known}",
            output_token_ids=tuple(said[:known]),
            extras=resumed(request, num_prompt),
        )
        rest = run(llm, begun)
        assert tokens(rest) == said[known:]
        assert logprobs(rest) == pytest.approx(logprobs(whole)[known * per_token :], abs=1e-4)
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert not any(rows_in(output.extras) for output in rest)


def test_log_probabilities_of_a_prompt_go_on_where_they_ended(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    (prepared,) = llm._prepare(parse_prompts(PROMPTS[1]), params)
    (request,) = prepared.engine_requests
    rows = [row for output in run(llm, request) for _, rows in [rows_in(output.extras) or (0, ())] for row in rows]
    outputs = run(llm, structs.replace(request, request_id="begun", extras=resumed(request, 4)))
    (first,) = [found for output in outputs if (found := rows_in(output.extras)) is not None]
    assert first[0] == 4
    assert [row.token_ids for row in first[1]] == [row.token_ids for row in rows[3:]]
