"""Readers of requests of an API process, and what they get when the engine goes on, aborts or dies without them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compiled_engine.engine.messages import EngineOutput, RequestLimits, StepOutputs
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.frontend.request_stream import OUTPUT_KINDS, RequestStream, RequestStreams
from compiled_engine.sampling.params import SamplingParams


def following(output: Any, n: int = 1) -> tuple[RequestStreams, RequestStream]:
    """Start a request of `n` completions, with the ids 0-0, 0-1 and so on."""
    inputs = InputProcessor(None, RequestLimits(100, 50, 50), frozenset())
    params = SamplingParams(max_tokens=9, n=n, detokenize=False)
    (request,) = inputs.process(parse_prompts([1, 2]), params)
    streams = RequestStreams(OutputProcessor(None))
    return streams, streams.add(request, output)


def say(streams: RequestStreams, *tokens: int, of: str = "0", finish: str | None = None) -> None:
    assert streams.process(StepOutputs(others=[EngineOutput(of, tokens, finish_reason=finish)])) == []


def read(stream: RequestStream) -> RequestOutput:
    """Return the next output, which must be ready."""
    return asyncio.run(asyncio.wait_for(stream.next(), 5))


@pytest.mark.parametrize("output", OUTPUT_KINDS)
def test_a_whole_answer_is_read_after_the_engine_has_died(output: str) -> None:
    streams, stream = following(output)
    say(streams, 5, 6)
    say(streams, 7, finish="length")
    assert streams.fail_all(lambda: RuntimeError("dead")) == []
    answer = read(stream)
    assert answer.finished
    assert (answer.outputs[0].token_ids, answer.outputs[0].finish_reason) == ([5, 6, 7], "length")


@pytest.mark.parametrize("output", OUTPUT_KINDS)
def test_half_an_answer_is_none_once_the_engine_has_died(output: str) -> None:
    streams, stream = following(output, n=2)
    say(streams, 5, of="0-0", finish="length")
    say(streams, 6, of="0-1")
    assert streams.fail_all(lambda: RuntimeError("dead")) == ["0-1"]
    with pytest.raises(RuntimeError, match="dead"):
        read(stream)
    assert len(streams) == 0


@pytest.mark.parametrize("output", OUTPUT_KINDS)
def test_a_reader_that_waits_is_woken_by_the_end_of_the_engine(output: str) -> None:
    streams, stream = following(output)

    async def wait() -> None:
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        streams.fail_all(lambda: RuntimeError("dead"))
        with pytest.raises(RuntimeError, match="dead"):
            await asyncio.wait_for(reader, 5)

    asyncio.run(wait())


@pytest.mark.parametrize(
    ("output", "expected"), [("cumulative", [[5, 6], [5, 6, 7]]), ("delta", [[5, 6], [7]]), ("final", [[5, 6, 7]])]
)
def test_a_slow_reader_gets_everything_since_its_last_output(output: str, expected: list[list[int]]) -> None:
    streams, stream = following(output)
    say(streams, 5)
    say(streams, 6)
    found = [] if output == "final" else [read(stream).outputs[0].token_ids]
    say(streams, 7, finish="length")
    assert [*found, read(stream).outputs[0].token_ids] == expected


@pytest.mark.parametrize("output", OUTPUT_KINDS)
def test_an_abort_ends_what_has_not_ended(output: str) -> None:
    streams, stream = following(output, n=2)
    say(streams, 5, of="0-0", finish="length")
    assert (streams.abort("0"), streams.abort("other")) == (["0-1"], [])
    answer = read(stream)
    assert answer.finished
    assert [each.finish_reason for each in answer.outputs] == ["length", "abort"]
    assert streams.num_unfinished == 0
    assert streams.remove(stream) == []
    assert "0" not in streams
