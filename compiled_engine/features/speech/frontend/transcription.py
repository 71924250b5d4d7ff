"""Defines the results of transcriptions, and runs the parts of a transcription, in an engine or on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.sampling.params import SamplingParams

FRAMES_PER_SECOND = 100  # of features
Result = TypeVar("Result")


@dataclass(frozen=True)
class Segment:
    """A part of the audio and its text. `start` and `end` are in seconds.

    Without timestamps, a segment is a window of the audio. With timestamps, it is a part of a window, and its tokens
    include the timestamps.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    # Of the segment's window: the temperature at which it was decoded, the mean log-probability of its tokens and the
    # end-of-text token, the size of its text divided by the size of the compressed text, and its first frame.
    temperature: float
    avg_logprob: float
    compression_ratio: float
    seek: int


@dataclass(frozen=True)
class Transcription:
    """The result of a transcription."""

    text: str
    language: str  # its code, such as "en"
    duration: float  # of the audio, in seconds
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, language: str, duration: float, parts: Sequence[Sequence[Segment]]) -> Transcription:
        """Return the transcription with these segments, in the order of their parts."""
        segments = tuple(segment for part in parts for segment in part)
        return cls("".join(segment.text for segment in segments).strip(), language, duration, segments)


class Asked(NamedTuple):
    """A prompt to run, with its sampling parameters."""

    prompt: dict[str, Any]
    params: SamplingParams


Decoding = Generator[Asked, RequestOutput, Result]
"""Yields one prompt after the other, receives the output of each, and returns a result."""


class Transcribing(NamedTuple):
    """The work of a transcription that has not begun.

    The parts of the audio are decoded independently of each other, after the language was detected.
    """

    detecting: Decoding[str]  # returns the language
    parts: Callable[[str], Sequence[Decoding[Sequence[Segment]]]]  # given the language: a decoding for each part
    duration: float  # of the audio, in seconds


def run(work: Transcribing, run_all: Callable[[list[Asked]], Sequence[RequestOutput]]) -> Transcription:
    """Run a transcription, and return its result. run_all: runs prompts, and returns their outputs in order."""
    (language,) = _run_together([work.detecting], run_all)
    return Transcription.of(language, work.duration, _run_together(work.parts(language), run_all))


def _run_together(
    decodings: Sequence[Decoding[Result]], run_all: Callable[[list[Asked]], Sequence[RequestOutput]]
) -> list[Result]:
    """Run decodings to their ends, and return their results. The next prompts of all decodings run together."""
    results: dict[int, Result] = {}
    outputs: dict[int, Any] = dict.fromkeys(range(len(decodings)))
    while outputs:
        asked = {}
        for number, output in outputs.items():
            try:
                asked[number] = decodings[number].send(output)
            except StopIteration as end:
                results[number] = end.value
        outputs = dict(zip(asked, run_all([*asked.values()]), strict=True)) if asked else {}
    return [results[number] for number in range(len(decodings))]


async def run_async(work: Transcribing, run_one: Callable[[Asked], Awaitable[RequestOutput]]) -> Transcription:
    """Run a transcription, and return its result. run_one: runs a prompt; it is called for several parts at a time."""
    language = await decoded(work.detecting, run_one)
    async with aclosing(stream(work, language, run_one)) as parts:
        return Transcription.of(language, work.duration, [part async for part in parts])


async def stream(
    work: Transcribing, language: str, run_one: Callable[[Asked], Awaitable[RequestOutput]]
) -> AsyncGenerator[Sequence[Segment], None]:
    """Run the parts of a transcription at the same time. Yield the segments of each part, in the order of the audio.

    A part's segments are yielded as soon as the part and all earlier parts have ended. run_one: runs a prompt.
    """
    running = [asyncio.create_task(decoded(part, run_one)) for part in work.parts(language)]
    try:
        for part in running:
            yield await part
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def decoded(decoding: Decoding[Result], run_one: Callable[[Asked], Awaitable[RequestOutput]]) -> Result:
    """Run a decoding prompt by prompt, and return its result. run_one: runs a prompt."""
    output: Any = None
    while True:
        try:
            asked = decoding.send(output)
        except StopIteration as end:
            result: Result = end.value
            return result
        output = await run_one(asked)
