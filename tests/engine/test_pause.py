"""Pauses: what becomes of requests in each mode, and of their keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from async_engines import collect, run
from small_engines import PROMPTS, SMALL

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

OPTIONS: dict[str, Any] = SMALL | {"dtype": "float32", "max_num_seqs": 2}
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**OPTIONS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, LONG, use_tqdm=False)]


@pytest.fixture(scope="module", params=[{}, {"async_scheduling": True}, {"data_parallel_size": 2}], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**OPTIONS | request.param)
    yield engine
    asyncio.run(engine.shutdown())


async def begun(engine: AsyncLLM, prompt: str) -> tuple[RequestOutput, AsyncGenerator[RequestOutput, None]]:
    """Return a request's first output, and the stream of the others."""
    stream = engine.generate(prompt, LONG)
    return await anext(stream), stream


async def stands_still(engine: AsyncLLM) -> None:
    steps = (await engine.metrics())["steps"]
    await asyncio.sleep(0.05)
    metrics = await engine.metrics()
    assert metrics["steps"] == steps
    assert metrics["paused"] == 1


@pytest.mark.parametrize("clear_cache", [True, False])
def test_kept_requests_end_as_if_there_had_been_no_pause(
    engine: AsyncLLM, expected: list[list[int]], clear_cache: bool
) -> None:
    async def main() -> None:
        before = (await engine.metrics())["preemptions"]
        _, stream = await begun(engine, PROMPTS[0])
        await engine.pause_generation(mode="keep", clear_cache=clear_cache)
        await engine.pause_generation(mode="keep", clear_cache=False)  # does not undo the clearing
        assert await engine.is_paused()
        later = asyncio.ensure_future(collect(engine.generate(PROMPTS[1], LONG, output="final")))
        await stands_still(engine)
        assert not later.done()
        await engine.resume_generation()
        assert not await engine.is_paused()
        for outputs, tokens in zip([await collect(stream), await later], expected, strict=False):
            assert outputs[-1].outputs[0].token_ids == tokens
        assert (await engine.metrics())["preemptions"] - before == int(clear_cache)

    run(main())


def test_a_pause_that_waits_lets_requests_end_that_have_begun(engine: AsyncLLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        streams = [await begun(engine, prompt) for prompt in PROMPTS[:2]]
        await engine.pause_generation(mode="wait")
        for (_, stream), tokens in zip(streams, expected, strict=False):
            (*_, last) = await collect(stream)
            assert last.outputs[0].token_ids == tokens
        later = asyncio.ensure_future(collect(engine.generate(PROMPTS[2], LONG, output="final")))
        await stands_still(engine)
        assert not later.done()
        await engine.resume_generation()
        assert (await later)[0].outputs[0].token_ids == expected[2]

    run(main())


def test_a_pause_that_waits_ends_with_the_client_of_the_last_request(engine: AsyncLLM) -> None:
    async def main() -> None:
        _, stream = await begun(engine, PROMPTS[0])
        pausing = asyncio.ensure_future(engine.pause_generation(mode="wait"))
        waiting = asyncio.ensure_future(collect(engine.generate(PROMPTS[1], LONG, output="final")))
        await asyncio.sleep(0)
        await stream.aclose()
        await pausing
        await stands_still(engine)
        await engine.resume_generation()
        assert (await waiting)[0].finished

    run(main())


def test_a_pause_that_aborts_ends_all_requests_with_their_tokens_so_far(
    engine: AsyncLLM, expected: list[list[int]]
) -> None:
    async def main() -> None:
        first, stream = await begun(engine, PROMPTS[0])
        others = [asyncio.ensure_future(collect(engine.generate(PROMPTS[1], LONG, output="final"))) for _ in range(9)]
        await asyncio.sleep(0)
        await engine.pause_generation()
        (*_, last) = await collect(stream)
        assert last.outputs[0].finish_reason == "abort"
        tokens = last.outputs[0].token_ids
        assert tokens == expected[0][: len(tokens)]
        assert len(tokens) >= len(first.outputs[0].token_ids)
        for other in others:
            ((output,),) = [await other]
            assert output.outputs[0].finish_reason == "abort"
        await stands_still(engine)
        await engine.resume_generation()
        (output,) = await collect(engine.generate(PROMPTS[0], LONG, output="final"))
        assert output.outputs[0].token_ids == expected[0]

    run(main())


def test_an_unknown_mode_is_refused(engine: AsyncLLM) -> None:
    async def main() -> None:
        mode: Any = "drain"
        with pytest.raises(ControlError, match="mode is 'drain'; allowed: abort, wait, keep"):
            await engine.pause_generation(mode=mode)
        assert not await engine.is_paused()

    run(main())


def test_a_reset_of_running_requests_changes_no_token(expected: list[list[int]]) -> None:
    with LLM(**OPTIONS) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        for _ in range(5):
            next(stream)
        assert llm.reset_prefix_cache(reset_running_requests=True)
        (*_, last) = stream
        assert last.outputs[0].token_ids == expected[0]
        assert llm.metrics()["preemptions"] == 1
        llm.core.check_integrity()
