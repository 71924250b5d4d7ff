"""/v1/audio/transcriptions and /v1/audio/translations: the text of an audio file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.features.speech.frontend.formats import FORMATS, TIMED
from compiled_engine.features.speech.frontend.transcription import Asked, Transcribing, decoded, run_async, stream
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.server.errors import ApiError, bad_request, blamed_on_request, require
from compiled_engine.server.generation import begun, generate
from compiled_engine.server.multipart import parts_of
from compiled_engine.server.replies import EventStream, Reply, event, read_bytes, unless_gone, with_errors
from compiled_engine.server.serving import Serving, serving_of


class TranscriptionForm(msgspec.Struct, kw_only=True):
    """The parts of a form with an audio file: WAV, FLAC, Ogg or MP3."""

    file: bytes
    model: str | None = None
    language: str | None = None  # a code such as en
    prompt: str | None = None  # a text before the audio's
    response_format: str | None = None  # json, text, verbose_json, srt or vtt
    temperature: float | None = None
    stream: bool | None = None  # true: events with the text so far, with the format json
    # The times in verbose_json: segment.
    granularity: str | None = msgspec.field(default=None, name="timestamp_granularities[]")


class TranscriptionResponse(msgspec.Struct):
    """The text of an audio file. In verbose_json further fields follow."""

    text: str


FIELDS = TranscriptionForm.__struct_encode_fields__
GRANULARITY = "timestamp_granularities[]"
# Fields of OpenAI's and other servers' APIs, with why they are refused.
REFUSED = {
    "chunking_strategy": "as audio is always cut into windows",
    "include[]": "as log-probabilities are those of segments, in verbose_json",
}
TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


async def transcriptions(request: Request) -> Reply:
    """Handle POST /v1/audio/transcriptions."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Reply:
    """Handle POST /v1/audio/translations."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Reply:
    serving = serving_of(request)
    body = await read_bytes(request, serving)
    form = _form(parts_of(request.headers.get("content-type", ""), body))
    file = form.pop("file", None)
    if file is None:
        raise bad_request("file", "file must be given: an audio file")
    fields = {name: _text(name, value) for name, value in form.items()}
    serving.model(fields.get("model"))
    wanted, streams = fields.get("response_format", "json"), _streams(fields)
    require(wanted in FORMATS, "response_format", f"one of {', '.join(FORMATS)}", wanted)
    require(not streams or wanted == "json", "response_format", "json with stream", wanted)
    has_times = GRANULARITY not in fields or wanted == "verbose_json"
    require(has_times, "response_format", f"verbose_json with {GRANULARITY}", wanted)
    reading = _work(serving, file, task, fields, timestamps=wanted in TIMED)
    work, run_one = await unless_gone(request.receive, reading), partial(_run, serving)
    if streams:
        return EventStream(with_errors(await begun(_events(work, run_one))), {})
    # The windows of a file run together, each within the server's bounds.
    result = await unless_gone(request.receive, run_async(work, run_one))
    kind = TYPES.get(wanted, "application/json")
    return Response(FORMATS[wanted](result, task), headers={"content-type": f"{kind}; charset=utf-8"})


def _form(parts: Mapping[str, list[bytes]]) -> dict[str, bytes]:
    """Return the values of a form's fields by name. Raises ApiError 400 for unknown, refused or repeated fields."""
    for name, values in parts.items():
        if name in REFUSED and values not in ([b"false"], [b""]):
            raise bad_request(name, f"{name} must be absent, {REFUSED[name]}")
        if name not in FIELDS and name not in REFUSED:
            raise bad_request(name[:100], f"{name[:100]!r} is no field; allowed: {', '.join(FIELDS)}")
        if name == GRANULARITY:
            require(set(values) == {b"segment"}, name, "segment, as words have no times", values[0].decode("latin-1"))
        else:
            require(len(values) == 1, name, "given once", len(values))
    return {name: values[0] for name, values in parts.items() if name in FIELDS}


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise bad_request(name, f"{name} must be valid UTF-8") from None


def _streams(fields: Mapping[str, str]) -> bool:
    given = fields.get("stream") or "false"
    require(given.lower() in ("true", "false"), "stream", "true or false", given)
    return given.lower() == "true"


async def _work(
    serving: Serving, file: bytes, task: str, fields: Mapping[str, str], *, timestamps: bool
) -> Transcribing:
    """Read the audio file in a thread, and return its transcription, which is still to be run.

    timestamps: whether segments get times. Raises ApiError 400 for an unreadable file or an invalid field.
    """
    speech = serving.engine.features.speech
    try:
        temperature = float(fields["temperature"]) if fields.get("temperature") else None
    except ValueError:
        raise bad_request("temperature", "temperature must be a number from 0 to 2") from None
    chosen = fields.get("language") or None, task, fields.get("prompt") or None, temperature
    try:
        return await asyncio.to_thread(speech.transcribing, file, *chosen, timestamps=timestamps)
    except ValueError as error:
        raise blamed_on_request(error, audio="file") from error


async def _events(
    work: Transcribing, run_one: Callable[[Asked], Awaitable[RequestOutput]]
) -> AsyncGenerator[bytes, None]:
    """Run a transcription. Yield an event for the new text of each window, and one for the whole text.

    run_one: runs one request on the engine.
    """
    language, text, sent = await decoded(work.detecting, run_one), "", ""
    async with aclosing(stream(work, language, run_one)) as parts:
        async for part in parts:
            text += "".join(segment.text for segment in part)
            if len(known := text.strip()) > len(sent):
                yield event({"type": "transcript.text.delta", "delta": known[len(sent) :]})
                sent = known
    yield event({"type": "transcript.text.done", "text": sent})


async def _run(serving: Serving, asked: Asked) -> RequestOutput:
    async with aclosing(generate(serving, [asked.prompt], asked.params, "final", field="file")) as outputs:
        async for _, output in outputs:
            if output.outputs[0].finish_reason == "abort":
                raise ApiError(503, f"the audio was not transcribed to its end: {output.outputs[0].stop_reason}")
            return output
    raise ApiError(500, "the engine gave no output")
