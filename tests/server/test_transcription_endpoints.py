"""A server whose model hears: the official client, formats, and forms that are refused."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import soundfile
from running_server import RunningServer, error_of, running
from speech_models import (
    FIRST_TIME,
    RATE,
    SpeechOracle,
    check_segments,
    random_clip,
    segments_of_generate,
    text_of_generate,
    transcribing_oracle,
)

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.core import PAUSED
from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.server import transcriptions

ENGINE: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "max_num_seqs": 4,
    "num_blocks": 64,
    "block_size": 4,
    "audio_workers": 1,
    "progress": False,
}
PATH = "/v1/audio/transcriptions"


def wav(seed: int, seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, random_clip(seed, seconds), RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return transcribing_oracle(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def hearing(oracle: SpeechOracle) -> Iterator[RunningServer]:
    with running(AsyncLLM(oracle.folder, **ENGINE)) as server:
        yield server


@pytest.fixture(scope="module")
def client(hearing: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asked(client: openai.OpenAI, seconds: float) -> dict[str, Any]:
    return {"file": ("a.wav", wav(1, seconds)), "model": client.models.list().data[0].id, "temperature": 0.0}


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_the_official_client_gets_what_transformers_generates(
    hearing: RunningServer, oracle: SpeechOracle, client: openai.OpenAI, task: str
) -> None:
    """The core is in another process, to which features are sent."""
    given: dict[str, Any] = {"language": "de", "task": task}
    ids = text_of_generate(oracle, random_clip(1), **given)
    text = hearing.engine.tokenizer.decode([token for token in ids if token < FIRST_TIME]).strip()
    if task == "translate":
        found = client.audio.translations.create(**asked(client, 1.0), extra_body={"language": "de"})
        assert found.text == text
        return
    found = client.audio.transcriptions.create(**asked(client, 1.0), language="de")
    assert found.text == text
    whole = client.audio.transcriptions.create(
        **asked(client, 1.7), language="de", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (whole.language, whole.duration) == ("de", pytest.approx(1.7))
    expected = segments_of_generate(oracle, random_clip(1, 1.7), **given)
    segments = whole.segments or []
    assert [each.tokens for each in segments] == [tokens for _, _, tokens in expected[: len(segments)]]
    assert [each.end for each in segments] == pytest.approx([end for _, end, _ in expected[: len(segments)]])


def test_the_official_client_reads_a_stream(client: openai.OpenAI) -> None:
    """An event for each window, in the order of the audio, whatever the order in which they are decoded."""
    whole = client.audio.transcriptions.create(**asked(client, 2.7), language="de")
    with client.audio.transcriptions.create(**asked(client, 2.7), language="de", stream=True) as events:
        *deltas, done = events
    assert done.type == "transcript.text.done"
    assert done.text == whole.text
    texts = [each.delta for each in deltas if each.type == "transcript.text.delta"]
    assert len(texts) == len(deltas) == 3
    assert "".join(texts) == whole.text


def test_the_engine_transcribes_for_python_too(hearing: RunningServer, oracle: SpeechOracle) -> None:
    audio = (random_clip(2, 1.2), RATE)
    work = hearing.engine.transcribe(audio, language="en", temperature=0.0, timestamps=True)
    found = asyncio.run_coroutine_threadsafe(work, hearing.loop).result(60)
    check_segments(found.segments, segments_of_generate(oracle, audio[0], language="en", task="transcribe"), 1.2)


def test_other_formats_are_text(hearing: RunningServer) -> None:
    for name, kind in (("srt", "application/x-subrip"), ("vtt", "text/vtt"), ("text", "text/plain")):
        form = {"response_format": name, "language": "en", "temperature": "0"}
        answer = httpx.post(hearing.url + PATH, files={"file": wav(0)}, data=form, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"


@pytest.mark.parametrize(
    ("form", "file", "param", "text"),
    [
        ({}, b"no audio", "file", "it is no audio file"),
        ({"language": "xx"}, wav(0), "language", "language is 'xx'; allowed: de, en"),
        ({"temperature": "hot"}, wav(0), "temperature", "a number from 0 to 2"),
        ({"temperature": "7"}, wav(0), "temperature", "a number from 0 to 2"),
        ({"response_format": "lrc"}, wav(0), "response_format", "one of text, json"),
        ({"stream": "maybe"}, wav(0), "stream", "stream must be true or false"),
        ({"stream": "true", "response_format": "srt"}, wav(0), "response_format", "must be json with stream"),
        ({"timestamp_granularities[]": "word"}, wav(0), "timestamp_granularities[]", "segment, as words have no times"),
        ({"timestamp_granularities[]": "segment"}, wav(0), "response_format", "must be verbose_json with timestamp"),
        ({"chunking_strategy": "auto"}, wav(0), "chunking_strategy", "chunking_strategy must be absent"),
        ({"tone": "x"}, wav(0), "tone", "is no field; allowed: file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_fields_are_refused(
    hearing: RunningServer, form: dict[str, str], file: bytes, param: str, text: str
) -> None:
    answer = httpx.post(hearing.url + PATH, files={"file": file}, data=form, timeout=60)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert text in error_of(answer)["message"]


FORM = "multipart/form-data; boundary=x"
HEAD = b'--x\r\ncontent-disposition: form-data; name="language"\r\n\r\nen\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "status", "text"),
    [
        ("application/json", b"{}", 415, "must be a form"),
        ("multipart/form-data", HEAD + b"--x--", 400, "must have a boundary"),
        (FORM, b"", 400, "must begin with its boundary"),
        (FORM, HEAD, 400, "must begin with its boundary"),
        (FORM, b"--x\r\nname=language\r\n--x--", 400, "a blank line"),
        (FORM, b"--x\r\ncontent-type: a/b\r\n\r\nen\r\n--x--", 400, "must have a name"),
        (FORM, HEAD + HEAD + b"--x--", 400, "language must be given once"),
        (FORM, b"".join([HEAD] * 70) + b"--x--", 400, "at most 64 parts"),
        (FORM, HEAD + b"--x--", 400, "file must be given"),
    ],
)
def test_damaged_forms_are_refused(hearing: RunningServer, kind: str, body: bytes, status: int, text: str) -> None:
    answer = httpx.post(hearing.url + PATH, content=body, headers={"content-type": kind}, timeout=60)
    assert answer.status_code == status
    assert text in error_of(answer)["message"]


def test_a_transcription_that_a_pause_ends_is_an_error(hearing: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def aborted(*given: Any, **more: Any) -> AsyncIterator[tuple[int, Any]]:
        yield 0, SimpleNamespace(outputs=[CompletionOutput(0, "", [], None, None, "abort", PAUSED)])

    monkeypatch.setattr(transcriptions, "generate", aborted)
    answer = httpx.post(f"{hearing.url}{PATH}", files={"file": wav(0)}, timeout=60)
    assert answer.status_code == 503
    assert error_of(answer)["message"] == "the audio was not transcribed to its end: the engine is paused"
