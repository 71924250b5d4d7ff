"""/v1/audio/transcriptions and /v1/audio/translations: the text of an audio file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.features.speech.frontend.formats import FORMATS
from compiled_engine.features.speech.frontend.transcription import Asked, Transcription, run_async
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.server.errors import ApiError, bad_request, blamed_on_request, require
from compiled_engine.server.generation import generate
from compiled_engine.server.multipart import parts_of
from compiled_engine.server.replies import read_bytes, unless_gone
from compiled_engine.server.serving import Serving, serving_of


class TranscriptionForm(msgspec.Struct, kw_only=True):
    """The parts of a form with an audio file: WAV, FLAC, Ogg or MP3."""

    file: bytes
    model: str | None = None
    language: str | None = None  # a code such as en
    prompt: str | None = None  # a text before the audio's
    response_format: str | None = None  # json, text, verbose_json, srt or vtt
    temperature: float | None = None


class TranscriptionResponse(msgspec.Struct):
    """The text of an audio file. In verbose_json further fields follow."""

    text: str


FIELDS = TranscriptionForm.__struct_fields__
# Fields of OpenAI's and other servers' APIs, with why they are refused.
REFUSED = {
    "stream": "as an answer is sent whole",
    "timestamp_granularities[]": "as windows alone have times",
    "chunking_strategy": "as audio is always cut into windows",
    "include[]": "as log-probabilities are those of segments, in verbose_json",
}
TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


async def transcriptions(request: Request) -> Response:
    """Handle POST /v1/audio/transcriptions."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """Handle POST /v1/audio/translations."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    serving = serving_of(request)
    body = await read_bytes(request, serving)
    form = _form(parts_of(request.headers.get("content-type", ""), body))
    file = form.pop("file", None)
    if file is None:
        raise bad_request("file", "file must be given: an audio file")
    fields = {name: _text(name, value) for name, value in form.items()}
    serving.model(fields.get("model"))
    wanted = fields.get("response_format", "json")
    require(wanted in FORMATS, "response_format", f"one of {', '.join(FORMATS)}", wanted)
    result = await unless_gone(request.receive, _transcribed(serving, file, task, fields))
    kind = TYPES.get(wanted, "application/json")
    return Response(FORMATS[wanted](result, task), headers={"content-type": f"{kind}; charset=utf-8"})


def _form(parts: Mapping[str, list[bytes]]) -> dict[str, bytes]:
    """Return the fields by name. Raises ApiError 400 for unknown, refused or repeated ones."""
    for name, values in parts.items():
        if name in REFUSED and values not in ([b"false"], [b""]):
            raise bad_request(name, f"{name} must be absent, {REFUSED[name]}")
        if name not in FIELDS and name not in REFUSED:
            raise bad_request(name[:100], f"{name[:100]!r} is no field; allowed: {', '.join(FIELDS)}")
        require(len(values) == 1, name, "given once", len(values))
    return {name: values[0] for name, values in parts.items() if name in FIELDS}


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise bad_request(name, f"{name} must be valid UTF-8") from None


async def _transcribed(serving: Serving, file: bytes, task: str, fields: Mapping[str, str]) -> Transcription:
    speech = serving.engine.features.speech
    try:
        temperature = float(fields["temperature"]) if fields.get("temperature") else None
    except ValueError:
        raise bad_request("temperature", "temperature must be a number from 0 to 2") from None
    chosen = fields.get("language") or None, task, fields.get("prompt") or None, temperature
    try:
        asking = await asyncio.to_thread(speech.transcribing, file, *chosen)
    except ValueError as error:
        raise blamed_on_request(error, audio="file") from error
    # The windows of a file run together, each within the server's bounds.
    return await run_async(asking, partial(_run, serving))


async def _run(serving: Serving, asked: Asked) -> RequestOutput:
    async with aclosing(generate(serving, [asked.prompt], asked.params, "final", field="file")) as outputs:
        async for _, output in outputs:
            return output
    raise ApiError(500, "the engine gave no output")
