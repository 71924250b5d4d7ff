"""What a server does with what it should not be asked: it says no, stays up, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_a_minute import in_a_minute
from running_server import COMPLETION, KEY, RunningServer, ScriptedEngine, error_of, running

from compiled_engine.server.errors import ApiError, without_internals
from compiled_engine.server.json_size import check_size
from compiled_engine.server.options import Limits, ServerOptions

MANY = 1 << 20  # more values than a test has


@pytest.fixture(scope="module")
def client(narrow: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            {"role": "usr", "content": "x"},
            "messages[0].role: expected 'assistant' or 'developer' or 'system' or 'tool' or 'user', got 'usr'",
        ),
        (
            {"role": "user", "content": [{"type": "video_url"}]},
            "messages[0].content[0].type: expected 'image_url' or 'input_image' or 'text', got 'video_url'",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]},
            "messages[0].content[0] must not be an image: the model takes only text",
        ),
    ],
)
def test_messages_say_which_words_are_allowed(client: httpx.Client, message: dict[str, Any], what: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": [message]})
    assert (response.status_code, error_of(response)["message"]) == (400, what)


def test_tokens_and_prompts_are_checked_against_the_model(server: RunningServer) -> None:
    for prompt in ([4096], [-1], [2**40], [1] * 256, "x " * 600):
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt}, timeout=30)
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert error_of(response)["code"] == "context_length_exceeded"
    response = httpx.post(f"{server.url}/detokenize", json={"tokens": [4096]}, timeout=60)
    assert (response.status_code, error_of(response)["param"]) == (400, "tokens")


def test_what_a_body_may_be(client: httpx.Client) -> None:
    def post(content: Any, kind: str = "application/json") -> httpx.Response:
        return client.post("/v1/completions", content=content, headers={"content-type": kind})

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    assert post(b" " * 20_001).status_code == 413
    assert post(b" " * 2_000_000).status_code == 413  # a client that writes all of it before it reads is told, too
    assert post(chunks()).status_code == 413
    assert post(b"{}", "text/plain").status_code == 415
    for body in (b"[" * 1000, b'{"a":' * 9 + b"1" + b"}" * 9, b"[]", b"", b"{", b'{"a": NaN}', b'"\xff"'):
        response = post(body)
        assert response.status_code == 400
        error_of(response)
    assert "8 arrays and objects" in error_of(post(b'{"a":' * 9 + b"1" + b"}" * 9))["message"]


@given(st.recursive(st.text() | st.integers(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)))
def test_depth_is_found_without_parsing(value: Any) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = json.dumps(value).encode()
    for most in {0, 1, max(0, depth(value) - 1), depth(value)}:
        with pytest.raises(ApiError) if depth(value) > most else contextlib.nullcontext():
            check_size(body, most, MANY)


def test_depth_is_found_in_time() -> None:
    """Of a text that is no JSON as well."""
    in_a_minute(r"""
from compiled_engine.server.errors import ApiError
from compiled_engine.server.json_size import check_size

def is_refused(body, max_depth):
    try:
        check_size(body, max_depth, 1 << 20)
    except ApiError:
        return True
    return False

string = b'"' + b'\\"' * 500_000
assert not is_refused(b"[1]," * 65 + string, 64)
assert is_refused(b"[" * 65 + string, 64)
assert not is_refused(b"[1]," * 65 + string + b'\\\n[[["', 2)
assert is_refused(b"[1]," * 65 + string + b'"[[["', 2)
""")


class Watched:
    """A tokenizer that notes its calls, and which of them an event loop waits for."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.in_loop: Counter[str] = Counter()

    def _note(self, call: str) -> None:
        self.calls[call] += 1
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self.in_loop[call] += 1

    def fewest_tokens(self, text: str) -> int:
        return 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self._note("encode")
        return [1]

    def decode(self, token_ids: list[int]) -> str:
        self._note("decode")
        return "x"

    def entry(self, token_id: int) -> str:
        self._note("entry")
        return "x"


def test_long_prompts_are_tokenised_beside_the_event_loop(client: httpx.Client, scripted: ScriptedEngine) -> None:
    scripted.tokenizer, scripted.chunks = Watched(), ["a"]
    plain = {"add_special_tokens": False}
    try:
        for prompt in ("x" * 9000, ["x" * 9000], ["x" * 5000] * 2):
            assert client.post("/v1/completions", json={**COMPLETION, **plain, "prompt": prompt}).status_code == 200
        asked = {**plain, "prompt": "x" * 9000, "return_token_strs": True}
        assert client.post("/tokenize", json=asked).status_code == 200
        assert client.post("/detokenize", json={"tokens": [1] * 5000}).status_code == 200
        assert (scripted.tokenizer.calls, scripted.tokenizer.in_loop) == ({"encode": 5, "entry": 1, "decode": 1}, {})
    finally:
        del scripted.tokenizer


def test_request_ids_are_words(client: httpx.Client) -> None:
    assert client.get("/version", headers={"x-request-id": "an-id.7"}).headers["x-request-id"] == "an-id.7"
    for strange in ("two words", "x" * 200, "<script>", "a;b"):
        assert re.fullmatch(
            "[0-9a-f]{32}", client.get("/version", headers={"x-request-id": strange}).headers["x-request-id"]
        )


def test_paths_and_methods_that_there_are_not(client: httpx.Client) -> None:
    for method, path, status in (("GET", "/v2", 404), ("PUT", "/v1/models", 405), ("GET", "/v1/completions", 405)):
        response = client.request(method, path)
        assert response.status_code == status
        error_of(response)
    response = client.post("/v1/completions", json={**COMPLETION, "model": "another"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_a_server_that_ends_is_alive_and_not_ready(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine)) as ending:
        assert httpx.get(f"{ending.url}/ready", timeout=60).status_code == 200
        ending.serving.stopping.set()  # as a signal does, before the listener closes
        response = httpx.get(f"{ending.url}/ready", timeout=60)
        assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
        assert httpx.get(f"{ending.url}/health", timeout=60).status_code == 200


def test_unexpected_errors_tell_nothing(client: httpx.Client, scripted: ScriptedEngine) -> None:
    scripted.error = RuntimeError("at 0x7f001234 in /home/someone/file.py")
    try:
        response = client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 500
        assert error_of(response)["message"] == "the server failed; its log has the reason"
        stream = client.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert "home" not in stream.text
    finally:
        scripted.error = None
    assert without_internals("it is <f at 0x7f001234> in '/a/b.py'") == "it is <f at ...> in '...'"


def test_a_request_that_forbids_every_token(server: RunningServer) -> None:
    asked = {"prompt": "x", "allowed_token_ids": [5], "bad_words_token_ids": [[5]], "max_tokens": 2}
    response = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert (response.status_code, error_of(response)["code"]) == (400, "no_token_allowed")
    stream = httpx.post(f"{server.url}/v1/completions", json={**asked, "stream": True}, timeout=60)
    assert "no_token_allowed" in stream.text


def test_long_values_do_not_come_back(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={**COMPLETION, "user_": "x" * 10_000, "temperature": "x" * 5000})
    assert response.status_code == 400
    assert len(response.content) < 3000


def test_a_long_name_of_a_model_is_compared_with_none(server: RunningServer) -> None:
    """An index of its characters would take 40 bytes for each."""
    with running(ScriptedEngine(server.engine), served_model_name=("one", "two")) as named:
        name = "x" * (1 << 20)
        tracemalloc.start()
        try:
            with pytest.raises(ApiError, match="does not exist"):
                named.serving.model(name)
            assert tracemalloc.get_traced_memory()[1] < 10 * len(name)
        finally:
            tracemalloc.stop()


def test_errors_are_valid_unicode() -> None:
    assert b"?" in ApiError(400, "\ud800").body()


@pytest.mark.parametrize(
    "options",
    [{"port": 70000}, {"tool_call_parser": "x"}, {"reasoning_parser": "x"}, {"uvicorn_log_level": "loud"},
     {"api_key": ("",)}, {"api_key": ("é",)}, {"admin_api_key": ("",)}, {"ssl_keyfile": "x"},
     {"shutdown_timeout": -1.0},
     {"allowed_origin": ("chat.example",)}, {"allowed_origin": ("https://*",)}, {"limits": Limits(max_completions=0)}],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)) if "limits" not in options else "max_completions"):
        ServerOptions(**options)


async def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_client_that_goes_ends_its_requests(server: RunningServer, path: str, stream: bool) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "stream": stream, "temperature": 1}
    if path == "completions":
        asked |= {"prompt": ["x", "y"], "n": 2}
    elif path == "responses":
        del asked["max_tokens"]
        asked |= {"input": "x"}
    else:
        asked |= {"messages": [{"role": "user", "content": "x"}], "n": 3}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            request = asyncio.ensure_future(
                client.send(client.build_request("POST", f"/v1/{path}", json=asked), stream=True)
            )
            await wait_until(lambda: server.engine.num_unfinished)
            if stream:
                await (await request).aclose()
            request.cancel()
        await wait_until(lambda: not server.engine.num_unfinished)
        await wait_until(lambda: not server.serving.admission.in_flight)

    asyncio.run(run())


def test_an_answer_has_the_length_that_the_server_allows(client: httpx.Client, scripted: ScriptedEngine) -> None:
    message = {"role": "user", "content": "x"}
    paths = {"completions": {"prompt": "x"}, "chat/completions": {"messages": [message]}, "responses": {"input": "x"}}
    for path, asked in paths.items():
        assert client.post(f"/v1/{path}", json=asked).status_code == 200
        assert scripted.asked[-1][1].max_tokens in (16, 20)
    for name in ("max_completion_tokens", "max_tokens"):
        response = client.post("/v1/chat/completions", json={"messages": [message], name: 21})
        assert (response.status_code, error_of(response)["param"]) == (400, name)
    for name in ("max_output_tokens", "top_logprobs"):
        response = client.post("/v1/responses", json={"input": "x", name: 21})
        assert (response.status_code, error_of(response)["param"]) == (400, name)
