"""A server whose model hears: the official client, formats, and forms that are refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import soundfile
from running_server import RunningServer, error_of, running
from speech_models import RATE, random_clip, transcribing_oracle

from compiled_engine import LLM
from compiled_engine.async_llm import AsyncLLM

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
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hearing")
    transcribing_oracle(folder)
    with running(AsyncLLM(folder, **ENGINE, core="in_process")) as server:
        yield server


def test_the_official_client_gets_what_the_engine_says(hearing: RunningServer) -> None:
    engine = hearing.engine.config.model.path
    with LLM(engine, **ENGINE) as llm:
        expected = {
            task: llm.transcribe(wav(1, 1.7), language="de", task=task, temperature=0.0)
            for task in ("transcribe", "translate")
        }
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"file": ("a.wav", wav(1, 1.7)), "model": "model", "temperature": 0.0}
        asked["model"] = client.models.list().data[0].id
        found = client.audio.transcriptions.create(**asked, language="de")
        assert found.text == expected["transcribe"].text
        whole = client.audio.transcriptions.create(**asked, language="de", response_format="verbose_json")
        assert whole.language == "de"
        assert [each.tokens for each in whole.segments or ()] == [
            list(each.token_ids) for each in expected["transcribe"].segments
        ]
        translated = client.audio.translations.create(**asked, extra_body={"language": "de"})
        assert translated.text == expected["translate"].text


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
        ({"stream": "true"}, wav(0), "stream", "stream must be absent"),
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
