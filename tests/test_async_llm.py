"""`AsyncLLM`: many requests on one event loop, equal to `LLM` token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from small_engines import PROMPTS, SMALL

from compiled_engine import LLM, AsyncLLM, RequestOutput, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, logprobs=1, prompt_logprobs=0),
    SamplingParams(temperature=1, seed=5, max_tokens=30, stop=["e"]),
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM(**SMALL, dtype="float32") as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module", params=["in_process", "process"])
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**SMALL, dtype="float32", core=request.param)
    yield engine
    asyncio.run(engine.shutdown())


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_outputs_are_those_of_llm(engine: AsyncLLM, expected: list[RequestOutput], kind: Any) -> None:
    async def run() -> list[list[RequestOutput]]:
        requests = zip(PROMPTS, PARAMS, strict=True)
        return await asyncio.gather(*(collect(engine, prompt, params, output=kind) for prompt, params in requests))

    for outputs, want in zip(asyncio.run(run()), expected, strict=True):
        assert outputs[-1].outputs == want.outputs
        assert outputs[-1].prompt_logprobs == want.prompt_logprobs
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) == 1 or kind == "cumulative"


def test_deltas_join_to_the_outputs_of_llm(engine: AsyncLLM, expected: list[RequestOutput]) -> None:
    async def run() -> list[list[RequestOutput]]:
        requests = zip(PROMPTS, PARAMS, strict=True)
        return await asyncio.gather(*(collect(engine, prompt, params, output="delta") for prompt, params in requests))

    for outputs, want in zip(asyncio.run(run()), expected, strict=True):
        for index, completion in enumerate(want.outputs):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            assert "".join(part.text for part in parts) == completion.text
            assert [token_id for part in parts for token_id in part.token_ids] == completion.token_ids
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            assert logprobs == (completion.logprobs or [])
            assert parts[-1].finish_reason == completion.finish_reason
        prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or ()]
        assert prompt_logprobs == (want.prompt_logprobs or [])
