"""A server whose model sees: the official client, other APIs, and images that are refused."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from image_engines import WITH_PROCESSOR, Oracle
from image_folders import as_file, picture, write_processor
from running_server import MODEL, RunningServer, error_of, running

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.server.errors import ApiError
from compiled_engine.server.serving import ImageGate

ENGINE = WITH_PROCESSOR | {"max_image_pixels": 1 << 14, "limit_mm_per_prompt": {"image": 3}}
ASKS: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


URL = url_of(as_file(picture(24, 24)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    Oracle(path, "Qwen3VLForConditionalGeneration")
    return write_processor(path, "Qwen3VLForConditionalGeneration")


@pytest.fixture(scope="module")
def trap() -> Iterator[tuple[int, list[Any]]]:
    """A port on this machine to which nothing may connect, and the connections that were made."""
    listener = socket.create_server(("127.0.0.1", 0))
    made: list[Any] = []

    def accept() -> None:
        try:
            while True:
                made.append(listener.accept())
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], made
    listener.close()


@pytest.fixture(scope="module")
def seeing(folder: Path, trap: tuple[int, list[Any]]) -> Iterator[RunningServer]:
    domains = (f"localhost:{trap[0]}", f"127.0.0.1:{trap[0]}")
    engine = AsyncLLM(folder, **ENGINE, allowed_media_domains=domains, core="in_process")
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(seeing: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def conversation(*urls: str, text: str = "what is it?") -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_answers_whole_and_streamed_are_equal(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=conversation(URL, URL), **ASKS)
    chunks = client.chat.completions.create(
        model=MODEL, messages=conversation(URL, URL), stream=True, stream_options={"include_usage": True}, **ASKS
    )
    chunks = list(chunks)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    # Each image of 24 x 24 pixels has 9 embeddings in the place of one placeholder.
    text_alone = client.chat.completions.create(model=MODEL, messages=conversation(), **ASKS)
    assert text_alone.usage is not None
    assert whole.usage.prompt_tokens == text_alone.usage.prompt_tokens + 2 * (9 + 2)


def test_requests_as_examples_make_them(client: openai.OpenAI) -> None:
    """Those of vLLM's documented client: one image in base64, and several, with names of images and of limits."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url_of(as_file(picture(24, 24, seed), "JPEG"), "jpeg")}, "uuid": "u"}
        for seed in (1, 2)
    ]
    texts = []
    for images in (parts[:1], parts):
        content: Any = [{"type": "text", "text": "What's in this image?"}, *images]
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": content}], model=MODEL, max_completion_tokens=8, temperature=0
        )
        assert answer.usage is not None
        texts.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert texts[1][1] - texts[0][1] == 9 + 2


def test_every_api_gives_the_same_answer(seeing: RunningServer, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=conversation(URL), **ASKS)
    parts: Any = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what is it?"}]
    response = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=16
    )
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
    message = httpx.post(f"{seeing.url}/v1/messages", json={**asked, **ASKS}, timeout=60).json()
    counted = httpx.post(f"{seeing.url}/v1/messages/count_tokens", json=asked, timeout=60).json()
    tokens = httpx.post(f"{seeing.url}/tokenize", json={"messages": conversation(URL)}, timeout=60).json()

    assert whole.usage is not None
    assert response.usage is not None
    assert message["content"][0]["text"] == whole.choices[0].message.content
    assert response.output_text.startswith(whole.choices[0].message.content or "")
    counts = {whole.usage.prompt_tokens, response.usage.input_tokens, counted["input_tokens"], tokens["count"]}
    assert counts == {message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]}


def test_the_list_of_models_and_the_metrics_tell_of_images(seeing: RunningServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=conversation(URL), **ASKS)
    card = httpx.get(f"{seeing.url}/v1/models", timeout=60).json()["data"][0]
    metrics = httpx.get(f"{seeing.url}/metrics", timeout=60).text

    assert card["input_modalities"] == ["text", "image"]
    assert float(metrics.split("compiled_engine:mm_cache_queries_total{")[1].split("} ")[1].split()[0]) >= 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://169.254.169.254/latest/meta-data", "images are not fetched from 169.254.169.254:80"),
        ("http://[::1]/a.png", "images are not fetched from ::1:80"),
        ("http://localhost:TRAP/a.png", "its address is not of the public internet"),
        ("http://127.0.0.1:TRAP/a.png", "its address is not of the public internet"),
        ("file:///etc/passwd", "file: URLs are not read"),
        ("/etc/passwd", "has no scheme that is read"),
        ("ftp://images.example/a", "has no scheme that is read"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:text/html;base64,YQ==", "must begin with data:image/"),
        (url_of(b"this is no image"), "the file is no image of a known format"),
        (url_of(as_file(picture(24, 24))[:200]), "the image file is damaged"),
        (url_of(as_file(picture(200, 200))), "has 200 x 200 pixels; allowed: at most 16384"),
        (url_of(as_file(picture(24, 24), "TIFF")), "the file is no image of a known format"),
    ],
)
def test_images_that_are_refused(seeing: RunningServer, trap: tuple[int, list[Any]], url: str, message: str) -> None:
    asked = {"messages": conversation(url.replace("TRAP", str(trap[0]))), **ASKS}
    response = httpx.post(f"{seeing.url}/v1/chat/completions", json=asked, timeout=60)
    error = error_of(response)

    assert (response.status_code, error["param"]) == (400, "messages")
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert trap[1] == []


def test_other_refusals(seeing: RunningServer) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        response = httpx.post(f"{seeing.url}/v1/chat/completions", json=fields, timeout=60)
        assert response.status_code == 400
        return error_of(response)

    assert "has 4 images; allowed: at most 3" in ask(messages=conversation(*[URL] * 4))["message"]
    assert ask(messages=conversation(URL, text="long " * 100))["code"] == "context_length_exceeded"
    assert "mm_processor_kwargs" in ask(messages=conversation(URL), mm_processor_kwargs={"size": 9})["message"]
    video = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]
    assert "got 'video_url'" in ask(messages=video)["message"]
    wrong = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]
    assert ask(messages=wrong)["message"].startswith("messages[0].content[0].image_url")


def test_images_that_may_become_large_wait_for_others() -> None:
    """In order, and a prompt alone has room for any image. Only the URLs that wait are bounded."""

    async def ask() -> list[str]:
        gate, begun = ImageGate(1000), list[str]()

        async def admitted(name: str, urls: int, size: int) -> None:
            async with gate.admit(urls, size):
                begun.append(name)
                await asyncio.sleep(0.02)
                begun.append(f"end of {name}")

        given = {"first": 1, "large": 3000, "small": 600, "other": 300, "next": 200}
        asked = [asyncio.create_task(admitted(name, 200, size)) for name, size in given.items()]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many images wait"):
            await admitted("sixth", 1, 1)
        await asyncio.gather(*asked)
        return begun

    found = asyncio.run(ask())
    assert found[:6] == ["first", "end of first", "large", "end of large", "small", "other"]
    assert found.index("next") > found.index("end of small")


def test_many_small_images_at_once_are_all_answered(seeing: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each of them may become so large that there is room for one."""
    monkeypatch.setattr(seeing.serving.images, "most", seeing.engine.features.images.most_bytes(1))

    def ask(seed: int) -> int:
        asked = {"messages": conversation(url_of(as_file(picture(24, 24, seed)))), **ASKS}
        return httpx.post(f"{seeing.url}/v1/chat/completions", json=asked, timeout=60).status_code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(20, 28))) == {200}


def test_a_prompt_that_is_truncated_may_be_longer(seeing: RunningServer) -> None:
    text, image = conversation(text="long " * 100)[0]["content"][0], conversation(URL)[0]["content"][0]
    asked = {"messages": [{"role": "user", "content": [text, image]}], "truncate_prompt_tokens": 100, **ASKS}
    response = httpx.post(f"{seeing.url}/v1/chat/completions", json=asked, timeout=60)
    assert (response.status_code, response.json()["usage"]["prompt_tokens"]) == (200, 100)


def test_a_body_that_is_too_long_is_refused(seeing: RunningServer) -> None:
    body = b'{"messages": "' + bytes(17 << 20)
    response = httpx.post(f"{seeing.url}/v1/chat/completions", content=body, timeout=60,
                          headers={"content-type": "application/json"})  # fmt: skip
    assert response.status_code == 413
