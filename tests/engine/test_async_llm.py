"""`AsyncLLM`: many requests on one event loop, with the tokens of `LLM`; nothing is left of those that end early."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from async_engines import ENGINE, LONG, collect, idle, run
from left_over import running
from small_engines import PROMPTS

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.core import CALLS
from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, logprobs=1, prompt_logprobs=0),
    SamplingParams(temperature=1, seed=5, max_tokens=30, stop=["e"]),
    SamplingParams(temperature=1.5, seed=6, max_tokens=25, top_k=40, repetition_penalty=1.2, bad_words=["self"]),
]
SLOW = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args={"fault": "slow"})
REQUESTS = list(zip([*PROMPTS, {"prompt_token_ids": [5, 6, 7]}], PARAMS, strict=True))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def in_process() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE, core="in_process")
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown())


def same_logprobs(
    ours: Sequence[dict[int, Logprob] | None] | None, theirs: Sequence[dict[int, Logprob] | None] | None
) -> None:
    """Log-probabilities are compared with a tolerance: requests that join another step are rows of another product,
    whose sums may end in other bits."""
    assert (ours is None) == (theirs is None)
    for row, expected in zip(ours or [], theirs or [], strict=True):
        assert (row is None) == (expected is None)
        if row is None or expected is None:
            continue
        assert {token: (entry.rank, entry.decoded_token) for token, entry in row.items()} == {
            token: (entry.rank, entry.decoded_token) for token, entry in expected.items()
        }
        assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
            {token: entry.logprob for token, entry in expected.items()}, abs=1e-4
        )


def same_but_for_logprobs(ours: CompletionOutput, theirs: CompletionOutput) -> None:
    none = {"logprobs": None, "cumulative_logprob": None}
    assert replace(ours, **none) == replace(theirs, **none)
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("core", ["in_process", "engine"])
@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_outputs_are_those_of_llm(core: str, kind: Any, llm: LLM, request: pytest.FixtureRequest) -> None:
    engine: AsyncLLM = request.getfixturevalue(core)

    async def main() -> list[list[RequestOutput]]:
        streams = [engine.generate(prompt, params, output=kind) for prompt, params in REQUESTS]
        return await asyncio.gather(*map(collect, streams))

    expected = llm.generate([prompt for prompt, _ in REQUESTS], PARAMS, use_tqdm=False)
    for outputs, want in zip(run(main()), expected, strict=True):
        for completion, whole in zip(outputs[-1].outputs, want.outputs, strict=True):
            same_but_for_logprobs(completion, whole)
            same_logprobs(completion.logprobs, whole.logprobs)
        same_logprobs(outputs[-1].prompt_logprobs, want.prompt_logprobs)
        assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (len(outputs) == 1) == (kind == "final")
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert metrics.time_in_queue is not None
        assert metrics.time_in_queue > 0
        assert metrics.tpot_s is not None


def test_deltas_join_to_the_outputs_of_llm(engine: AsyncLLM, llm: LLM) -> None:
    async def main() -> list[list[RequestOutput]]:
        streams = [engine.generate(prompt, params, output="delta") for prompt, params in REQUESTS]
        return await asyncio.gather(*map(collect, streams))

    expected = llm.generate([prompt for prompt, _ in REQUESTS], PARAMS, use_tqdm=False)
    for outputs, want in zip(run(main()), expected, strict=True):
        for index, completion in enumerate(want.outputs):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            assert "".join(part.text for part in parts) == completion.text
            assert [token_id for part in parts for token_id in part.token_ids] == completion.token_ids
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            same_logprobs(logprobs, completion.logprobs or [])
            assert parts[-1].finish_reason == completion.finish_reason
        prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or ()]
        same_logprobs(prompt_logprobs, want.prompt_logprobs or [])


def test_a_template_that_loops_holds_up_no_other_request(in_process: AsyncLLM) -> None:
    """And loops no more once its caller has gone. Few tokens, since the loop takes most of the time of each step."""
    looping = "{% for a in range(99999) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"

    async def main() -> None:
        conversation = [{"role": "user", "content": "x"}]
        for _ in range(3):  # more than there are threads
            loop = asyncio.ensure_future(collect(in_process.chat(conversation, LONG, chat_template=looping)))
            outputs = await collect(in_process.generate(PROMPTS[0], SamplingParams(max_tokens=2)))
            assert (outputs[-1].finished, loop.done()) == (True, False)
            loop.cancel()
            await asyncio.wait([loop])
        assert (await collect(in_process.chat(conversation, LONG, chat_template="{{ 1 }}")))[-1].finished

    run(main())


def test_chat_renders_as_llm_does(engine: AsyncLLM, llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Write a class."}]
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    params = SamplingParams(temperature=0, max_tokens=5)
    (output,) = run(collect(engine.chat(conversation, params, "mine", chat_template=template, output="final")))
    (want,) = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
    assert (output.request_id, output.prompt, output.outputs) == ("mine", want.prompt, want.outputs)


def test_hundreds_of_streams_at_once(engine: AsyncLLM, llm: LLM) -> None:
    kinds = [
        (f"{prompt}{number}", SamplingParams(temperature=number % 2, seed=number, max_tokens=3 + number % 3))
        for number in range(20)
        for prompt in PROMPTS
    ]

    async def one(number: int) -> list[int]:
        prompt, params = kinds[number % len(kinds)]
        token_ids: list[int] = []
        async for output in engine.generate(prompt, params, output="delta"):
            token_ids += output.outputs[0].token_ids
        return token_ids

    async def main() -> list[list[int]]:
        tasks = [asyncio.create_task(one(number)) for number in range(600)]
        await asyncio.sleep(0)
        assert engine.num_unfinished == 600
        return await asyncio.gather(*tasks)

    expected = llm.generate([prompt for prompt, _ in kinds], [params for _, params in kinds], use_tqdm=False)
    found = run(main())
    assert found == [expected[number % len(kinds)].outputs[0].token_ids for number in range(600)]
    run(idle(engine))


def test_a_slow_reader_gets_all_at_once(engine: AsyncLLM, llm: LLM) -> None:
    """Output that was not read yet is one delta, however many steps it comes from."""

    async def main() -> list[RequestOutput]:
        outputs = []
        async with aclosing(engine.generate(PROMPTS[0], LONG, output="delta")) as stream:
            outputs.append(await anext(stream))
            while (await engine.metrics())["running"]:
                await asyncio.sleep(0.01)
            outputs += await collect(stream)
        return outputs

    outputs = run(main())
    (want,) = llm.generate(PROMPTS[0], LONG, use_tqdm=False)
    assert len(outputs) == 2
    assert "".join(output.outputs[0].text for output in outputs) == want.outputs[0].text
    run(idle(engine))


async def cancel_when(engine: AsyncLLM, ready: Callable[[dict[str, Any]], bool], params: SamplingParams) -> None:
    """Cancel a request's task once the core's figures are so."""
    task = asyncio.create_task(collect(engine.generate(list(range(5, 20)), params)))
    while not ready(await engine.metrics()):
        assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_ends_a_request_that_decodes(engine: AsyncLLM, n: int) -> None:
    params = SamplingParams(temperature=1, n=n, max_tokens=40, ignore_eos=True, extra_args={"fault": "slow"})

    async def main() -> None:
        before = await idle(engine)
        await cancel_when(engine, lambda metrics: metrics["steps"] > before["steps"] + 3, params)
        after = await idle(engine)
        assert after["aborted"] == before["aborted"] + n

    run(main())


def test_cancelling_ends_a_request_that_waits(engine: AsyncLLM) -> None:
    """All rows are taken."""
    blocking = SamplingParams(temperature=1, n=64, max_tokens=40, ignore_eos=True, extra_args={"fault": "slow"})

    async def main() -> None:
        async with aclosing(engine.generate("a", blocking)) as others:
            await anext(others)
            await cancel_when(engine, lambda metrics: metrics["waiting"] == 1, LONG)
            metrics = await engine.metrics()
            assert (metrics["running"], metrics["waiting"]) == (64, 0)
        await idle(engine)

    run(main())


def test_a_request_that_is_not_read_is_not_sent(engine: AsyncLLM) -> None:
    async def main() -> None:
        before = await idle(engine)
        unread = engine.generate(PROMPTS[0], LONG)
        task = asyncio.create_task(collect(engine.generate(PROMPTS[0], LONG)))
        task.cancel()  # before its first step
        with suppress(asyncio.CancelledError):
            await task
        await unread.aclose()
        assert (await idle(engine))["aborted"] == before["aborted"]

    run(main())


def test_abort_ends_a_request_for_its_reader_too(engine: AsyncLLM) -> None:
    async def main() -> RequestOutput:
        async with aclosing(engine.generate(PROMPTS[0], SLOW, "to end")) as stream:
            await anext(stream)
            await engine.abort("to end")
            await engine.abort("to end")
            await engine.abort("of nobody")
            (*_, last) = await collect(stream)
        await idle(engine)
        return last

    last = run(main())
    assert last.outputs[0].finish_reason == "abort"
    assert 0 < len(last.outputs[0].token_ids) < 40


def test_a_thousand_random_aborts_leave_nothing(engine: AsyncLLM) -> None:
    """Neither blocks nor rows nor file descriptors, and those that stay have their tokens."""
    choose = random.Random(0)
    core = max(running("core_main"), key=lambda each: each.create_time())  # servers of other tests may run

    async def one(number: int) -> None:
        await asyncio.sleep(choose.random())
        params = SamplingParams(temperature=1, n=choose.choice([1, 1, 1, 3]), max_tokens=choose.randint(1, 30))
        stream = engine.generate([5 + number % 50] * choose.randint(1, 30), params, f"random {number}")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(choose.random() * 0.3)
        if number % 3 == 0:
            await engine.abort(f"random {number}")
        if number % 3 != 2:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def main() -> tuple[list[RequestOutput], list[RequestOutput]]:
        before = await collect(engine.generate(PROMPTS[0], LONG, output="final"))
        gc.collect()  # descriptors of earlier tests would go in the middle
        own, of_core = psutil.Process().num_fds(), core.num_fds()
        stays = asyncio.create_task(collect(engine.generate(PROMPTS[0], LONG, output="final")))
        await asyncio.gather(*map(one, range(1000)))
        await idle(engine)
        assert psutil.Process().num_fds() <= own
        assert core.num_fds() <= of_core
        return before, await stays

    (alone,), (among_others,) = run(main())
    assert among_others.outputs == alone.outputs


def test_nan_ends_its_request_alone(engine: AsyncLLM, llm: LLM) -> None:
    bad = SamplingParams(temperature=0, max_tokens=9, extra_args={"fault": "nan"})

    async def main() -> list[list[RequestOutput]]:
        params = [LONG, bad, LONG]
        streams = [engine.generate(prompt, param) for prompt, param in zip(PROMPTS, params, strict=True)]
        return await asyncio.gather(*map(collect, streams))

    good, (*_, failed), _ = run(main())
    assert failed.outputs[0].finish_reason == "error"
    assert str(failed.outputs[0].stop_reason).startswith("the logits of the next token are NaN")
    assert good[-1].outputs == llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs
    run(idle(engine))


def test_bad_input_is_refused_before_it_is_sent(engine: AsyncLLM) -> None:
    class Mask:
        def allowed(self, output_token_ids: Any) -> np.ndarray:
            raise AssertionError

    async def refused(*arguments: Any, **options: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            await collect(engine.generate(*arguments, **options))
        return str(caught.value)

    async def main() -> None:
        before = await idle(engine)
        assert "prompt must be a single prompt" in await refused(["a", "b"])
        assert "prompts must have at most 63 tokens" in await refused([5] * 64)
        assert "token 0 must be within the vocabulary" in await refused([10**6])
        assert "sampling_params must be SamplingParams" in await refused("a", {"temperature": 1})
        assert "output is 'all'; allowed: cumulative, delta, final" in await refused("a", output="all")
        assert "token_mask must be None unless core is" in await refused("a", SamplingParams(token_mask=Mask()))
        assert "must be valid Unicode" in await refused("\ud800" * 9000)
        async with aclosing(engine.generate("a", SLOW, "taken")) as stream:
            await anext(stream)
            assert "request_id 'taken' is already in use" in await refused("a", None, "taken")
        after = await idle(engine)
        assert after["aborted"] + after["finished"] == before["aborted"] + before["finished"] + 1

    run(main())


def test_who_got_more_than_a_message_holds_takes_nothing_any_more(
    in_process: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_engine.processes.channel.LARGEST_MESSAGE", 100_000)
    params = replace(SLOW, prompt_logprobs=-1)

    async def main() -> RequestOutput:
        (output,) = await collect(in_process.generate({"prompt_token_ids": [5] * 20}, params, output="final"))
        await idle(in_process)
        return output

    output = run(main())
    assert output.outputs[0].finish_reason == "error"
    assert "a message must have at most 100000 bytes" in str(output.outputs[0].stop_reason)


def test_token_masks_work_in_process(in_process: AsyncLLM) -> None:
    class Only7:
        def allowed(self, output_token_ids: Any) -> np.ndarray:
            mask = np.zeros(4096 // 32, np.int32)
            mask[0] = 1 << 7
            return mask

    params = SamplingParams(temperature=1, max_tokens=3, token_mask=Only7())
    (output,) = run(collect(in_process.generate("a", params, output="final")))
    assert output.outputs[0].token_ids == [7, 7, 7]


def test_metrics_are_those_of_llm(engine: AsyncLLM, llm: LLM) -> None:
    metrics = run(engine.metrics())
    of_llm = llm.metrics()
    assert metrics.keys() == of_llm.keys() | {"api_processes"}
    assert [type(metrics[key]) for key in of_llm] == [type(value) for value in of_llm.values()]
    stages = [stage["name"] for stage in metrics["start_up"]]
    assert stages[:3] == ["before the engine", "configuration", "wait for the core's process"]


def test_reset_prefix_cache(engine: AsyncLLM) -> None:
    prompt = list(range(100, 140))

    async def main() -> list[int | None]:
        found = []
        for _ in range(2):
            (output,) = await collect(engine.generate(prompt, SamplingParams(max_tokens=2), output="final"))
            found.append(output.num_cached_tokens)
        await engine.reset_prefix_cache()
        (output,) = await collect(engine.generate(prompt, SamplingParams(max_tokens=2), output="final"))
        return [*found, output.num_cached_tokens]

    assert run(main()) == [0, 32, 0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("close", {}, f"call is 'close'; allowed: {', '.join(CALLS)}(, .*)?"),
        ("reset_prefix_cache", {"some": 1}, "reset_prefix_cache: TypeError: .* unexpected keyword argument 'some'"),
    ],
)
def test_a_call_that_fails_ends_nothing(engine: AsyncLLM, name: str, arguments: dict[str, int], message: str) -> None:
    client = engine._client

    async def main() -> list[RequestOutput]:
        async with aclosing(engine.generate(PROMPTS[0], LONG)) as stream:
            await anext(stream)
            with pytest.raises(ControlError, match=f"^{message}$"):
                await client.call(name, **arguments)
            return await collect(stream)

    assert run(main())[-1].finished
