"""What a server does with what it should not be asked: it says no, stays up, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_a_minute import in_a_minute
from running_server import MODEL, RunningServer, ScriptedEngine, error_of, running

from compiled_engine.server.errors import ApiError, without_internals
from compiled_engine.server.json_size import is_deeper_than
from compiled_engine.server.middleware import visitor_check
from compiled_engine.server.options import Limits, ServerOptions
from compiled_engine.server.protocol import CompletionRequest
from compiled_engine.server.request_fields import MOST_UNKNOWN, read_request
from compiled_engine.server.run import bind
from compiled_engine.server.web_origins import AllowedPages

COMPLETION = {"model": MODEL, "prompt": "x = 1", "max_tokens": 2}
KEY = "a key"
LIMITS = Limits(max_body_bytes=20_000, max_header_bytes=4096, max_json_depth=8, max_in_flight=4, max_logprobs=5,
                max_stop=4, max_stop_length=16, max_token_list=8, max_completions=4, max_messages=4, max_tools=2,
                max_logprob_entries=100, max_answer_tokens=20,
                receive_timeout=1.0, keep_alive_timeout=1.0, write_timeout=1.0)  # fmt: skip


@pytest.fixture(scope="module")
def scripted(server: RunningServer) -> ScriptedEngine:
    return ScriptedEngine(server.engine, ["a", "b"])


@pytest.fixture(scope="module")
def narrow(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server that allows little, and asks for a key."""
    with running(scripted, api_key=("another", KEY), limits=LIMITS, strict=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(narrow: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client


def test_every_path_but_health_asks_for_the_key(narrow: RunningServer) -> None:
    wrong = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
    )
    for path in ("/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/version", "/nothing"):
        for headers in wrong:
            response = httpx.get(narrow.url + path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(narrow.url + path, headers={"authorization": f"bearer {KEY}"}).status_code != 401
    for path in ("/health", "/ping", "/ready"):
        assert httpx.get(narrow.url + path).status_code == 200
    assert httpx.get(f"{narrow.url}/load", headers={"authorization": f"Bearer {KEY}"}).json() == {"server_load": 0}


def test_what_needs_a_key_for_administrators(server: RunningServer) -> None:
    """Which is a key for everything else too; of others some may wait for all, and none may go before all."""
    engine = ScriptedEngine(server.engine, ["a"])
    with running(engine, api_key=(KEY,), admin_api_key=("admin",)) as asking:

        def status(key: str, priority: int) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {**COMPLETION, "priority": priority}
            del body["model"]
            return httpx.post(f"{asking.url}/v1/completions", json=body, headers=headers, timeout=30).status_code

        for key, priority, expected in (
            (KEY, 0, 200), (KEY, 5, 200), (KEY, -1, 403), ("admin", -1, 200), ("admin", 5, 200), ("x", 0, 401),
        ):  # fmt: skip
            assert status(key, priority) == expected
    with running(ScriptedEngine(server.engine, ["a"]), admin_api_key=("admin",)) as open_to_all:
        for key, priority, expected in (("x", 0, 200), ("x", -1, 403), ("admin", -1, 200)):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "priority": priority}
            url = f"{open_to_all.url}/v1/completions"
            assert httpx.post(url, json=body, headers=headers, timeout=30).status_code == expected


@pytest.mark.parametrize("root_path", ["/llm", "/llm/"])
@pytest.mark.parametrize("prefix", ["", "/llm"])  # the proxy removes it, or leaves it
def test_a_proxys_prefix_is_no_part_of_a_path(server: RunningServer, prefix: str, root_path: str) -> None:
    with running(ScriptedEngine(server.engine), api_key=(KEY,), root_path=root_path) as behind_proxy:
        url = behind_proxy.url + prefix
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{behind_proxy.url}/llm/llm/v1/models", headers=headers).status_code == 404
        counted = {
            sample.labels["route"]
            for family in behind_proxy.serving.metrics.collect({})
            for sample in family.samples
            if "route" in sample.labels
        }
        assert counted == {"/health", "/v1/models", "other"}


@pytest.mark.parametrize("prefix", ["", "/v1"])  # the proxy removes it, or leaves it
def test_a_proxys_prefix_may_be_the_beginning_of_known_paths(server: RunningServer, prefix: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    with running(ScriptedEngine(server.engine, ["a"]), api_key=(KEY,), root_path="/v1") as behind_proxy:
        url = behind_proxy.url + prefix
        assert httpx.get(f"{url}/health").status_code == 200
        name = httpx.get(f"{url}/v1/models", headers=key).json()["data"][0]["id"]
        assert httpx.get(f"{url}/v1/models/{name}", headers=key).json()["id"] == name
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=key, timeout=30).status_code == 200
        assert httpx.get(f"{url}/v1/completions", headers=key).status_code == 405
        assert httpx.get(f"{url}/v1/nothing", headers=key).status_code == 404
    with running(ScriptedEngine(server.engine), root_path="/v1/models") as behind_proxy:
        url = behind_proxy.url + prefix.replace("/v1", "/v1/models")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("root_path", ["/llm", "/v1"])
def test_the_log_of_requests_has_a_proxys_prefix_once(
    server: RunningServer, root_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(ScriptedEngine(server.engine), root_path=root_path, uvicorn_log_level="info") as behind_proxy:
        for prefix in ("", root_path):
            httpx.get(f"{behind_proxy.url}{prefix}/v1/models")
    assert re.findall("GET ([^ ]*models)", capsys.readouterr().out) == [f"{root_path}/v1/models"] * 2


BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 5}),
    ("n", {"n": 2, "prompt": ["a", "b", "c"]}),
    ("max_tokens", {"max_tokens": 21}),
    ("min_tokens", {"min_tokens": 21}),
    ("logprobs", {"logprobs": 6}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 6}),
    ("prompt_logprobs", {"prompt_logprobs": 5, "prompt": "x" * 30}),
    ("logprobs", {"logprobs": 5, "n": 2, "max_tokens": 20}),
    ("stop", {"stop": ["a"] * 5}),
    ("stop", {"stop": "a" * 17}),
    ("stop_token_ids", {"stop_token_ids": [1] * 9}),
    ("bad_words", {"bad_words": ["a"] * 9}),
    ("bad_words", {"bad_words": ["a" * 17]}),
    ("bad_words_token_ids", {"bad_words_token_ids": [[1]] * 9}),
    ("logit_bias", {"logit_bias": {str(token): 1 for token in range(9)}}),
    ("logit_bias", {"logit_bias": {"one": 1}}),
    ("strange", {"strange": 1}),
]


@pytest.mark.parametrize(("param", "asked"), BOUNDS)
def test_bounds_of_a_request(client: httpx.Client, param: str, asked: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json={**COMPLETION, **asked})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_bounds_of_a_conversation(client: httpx.Client) -> None:
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    asked: list[tuple[str, Any]] = [("messages", [message] * 5), ("tools", [tool] * 3)]
    for name, value in asked:
        response = client.post("/v1/chat/completions", json={"messages": [message], name: value})
        assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            {"role": "usr", "content": "x"},
            "messages[0].role: expected 'assistant' or 'developer' or 'system' or 'tool' or 'user', got 'usr'",
        ),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0].type: expected 'text', got 'image_url'",
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
    response = httpx.post(f"{server.url}/detokenize", json={"tokens": [4096]})
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
    for most in (0, 1, depth(value) - 1, depth(value)):
        assert is_deeper_than(body, most) == (depth(value) > most) or most < 0


def test_depth_is_found_in_time() -> None:
    """Of a text that is no JSON as well."""
    in_a_minute(r"""
from compiled_engine.server.json_size import is_deeper_than
string = b'"' + b'\\"' * 500_000
assert not is_deeper_than(b"[1]," * 65 + string, 64)
assert is_deeper_than(b"[" * 65 + string, 64)
assert not is_deeper_than(b"[1]," * 65 + string + b'\\\n[[["', 2)
assert is_deeper_than(b"[1]," * 65 + string + b'"[[["', 2)
""")


def raw(server: RunningServer, data: bytes, wait_s: float = 5) -> bytes:
    """What comes back on a connection until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def test_an_origin_without_a_host_is_nobodys_own() -> None:
    error = visitor_check(ServerOptions(host="0.0.0.0"))({"host": ":8000", "origin": "http://:8000"})
    assert error is not None
    assert error.code == "origin_not_allowed"


def test_nothing_is_answered_behind_what_was_refused(narrow: RunningServer) -> None:
    """Whatever else comes on the connection."""
    host, port = narrow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 5000 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                assert b" 200 " not in chunk


def test_headers_have_a_bound(narrow: RunningServer) -> None:
    for header in (
        b"a: " + b"x" * 5000,
        b"\r\n".join(b"a%d: x" % number for number in range(900)),
        b"a: " + b"x" * 100_000,
    ):
        answer = raw(narrow, b"GET /health HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"invalid_request_error"' in answer
    answer = raw(narrow, b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert raw(narrow, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a key\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "sent",
    [b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 5000, CHUNKED + b"1;" + b"a" * 5000],
    ids=["a header", "the extension of a chunk"],
)
def test_what_has_no_end_is_refused_at_the_bound(narrow: RunningServer, sent: bytes) -> None:
    """Not when its time is over."""
    assert raw(narrow, sent).startswith(b"HTTP/1.1 431 ")


def test_a_short_trailer_is_refused_too(narrow: RunningServer) -> None:
    answer = raw(narrow, CHUNKED + b"2\r\n{}\r\n0\r\na: b\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"no headers after the body" in answer


def test_a_refused_request_may_not_go_on_with_its_body(server: RunningServer) -> None:
    """Though it would have had a minute."""
    with running(ScriptedEngine(server.engine), api_key=(KEY,)) as asking:
        host, port = asking.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(CHUNKED.replace(KEY.encode(), b"wrong"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
            deadline = time.monotonic() + 20
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < deadline:
                    connection.sendall(b"1\r\n \r\n")
                    time.sleep(0.1)
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b"1\r\n \r\n0\r\n", b"a: b\r\n"),
        (b"1\r\n \r\n0\r\na: ", b"b"),
        (b"1;", b"a=b;"),
        (b"", b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa=b\r\n \r\n"),
    ],
    ids=["trailers", "a long trailer", "a long extension", "extensions"],
)
def test_what_stands_beside_a_body_has_a_bound(narrow: RunningServer, body: bytes, more: bytes) -> None:
    """Without a key, and after the answer as well: nothing of it is kept, and the connection ends."""
    host, port = narrow.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    before = psutil.Process().memory_info().rss
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head + body)
        with contextlib.suppress(OSError):
            for _ in range(300):
                connection.sendall(more * (100_000 // len(more)))
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                pass
    assert psutil.Process().memory_info().rss - before < 20 << 20
    assert httpx.get(f"{narrow.url}/health").status_code == 200


def test_a_body_in_many_small_chunks_is_read(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x" * 200, "max_tokens": 1}).encode()
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=(bytes([byte]) for byte in b" " * 60_000 + body),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 200


def test_requests_that_are_refused_or_odd_fill_no_log(narrow: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "uvicorn.error"):
        upgrade = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        assert raw(narrow, upgrade).startswith(b"HTTP/1.1 200 ")
        assert raw(narrow, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "localhost:8000"}, None),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "192.168.0.7:8000"}, None),
        ({"host": "gpu-box:8000"}, None),
        ({"host": "chat.example", "origin": "https://chat.example"}, None),
        ({"host": "app.localhost:8000", "origin": "http://app.localhost:8000"}, None),
        ({"host": "localhost:8000", "origin": "https://chat.example"}, None),
        ({}, None),
        ({"host": "rebound.example:8000"}, "host_not_allowed"),
        ({"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, "host_not_allowed"),
        ({"host": "127.0.0.1.rebound.example"}, "host_not_allowed"),
        ({"host": "["}, "host_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://chat.example"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "null"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://localhost:70000"}, "origin_not_allowed"),
        ({"origin": "https://user@chat.example"}, "origin_not_allowed"),
        ({"origin": "https://chat.example/x"}, "origin_not_allowed"),
        ({"origin": "https://chat.example:0"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://localhost:8000/x"}, "origin_not_allowed"),
    ],
)
def test_web_pages_that_may_use_a_server_without_a_key(headers: dict[str, str], code: str | None) -> None:
    error = visitor_check(ServerOptions(allowed_origin=("https://chat.example",)))(headers)
    assert (error.code if error else None) == code
    assert visitor_check(ServerOptions(api_key=(KEY,)))(headers) is None
    elsewhere = visitor_check(ServerOptions(host="0.0.0.0", allowed_origin=("https://chat.example",)))(headers)
    assert (elsewhere.code if elsewhere else None) == (code if code == "origin_not_allowed" else None)


@pytest.mark.parametrize(
    "origin",
    ["https://chat.example:65536", "https://chat.example:0", "https://[1:2]", "https://user@a.example", "null"],
)
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    """Else every page without an origin might use the server."""
    with pytest.raises(ValueError, match=r"^allowed_origin is .*; allowed: scheme, host and perhaps a port from 1 to"):
        ServerOptions(allowed_origin=(origin,))


@pytest.mark.parametrize(
    ("allowed", "same", "other"),
    [
        ("https://chat.example", "https://chat.example:443", "https://chat.example:0"),
        ("http://chat.example:80", "http://chat.example", "https://chat.example:80"),
        ("https://[2001:db8:0::1]:8443", "https://[2001:db8::1]:8443", "https://[2001:db8::1]"),
        ("https://chat.example", "https://CHAT.example", "https://chat.example:65536"),
    ],
)
def test_origins_are_the_same_however_they_are_written(allowed: str, same: str, other: str) -> None:
    pages = AllowedPages((allowed,))
    assert same in pages
    for origin in (other, "", "null", f"{allowed}/", "https://[1:2]"):
        assert origin not in pages


def test_a_page_of_another_site_gets_nothing(server: RunningServer) -> None:
    for headers in ({"host": "rebound.example"}, {"origin": "https://evil.example"}):
        for method, path in (("GET", "/metrics"), ("POST", "/v1/completions")):
            response = httpx.request(method, server.url + path, json={"prompt": "x"}, headers=headers)
            assert (response.status_code, next(iter(headers)) in error_of(response)["message"]) == (403, True)
    response = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "x"}')  # as a page may send unasked
    assert response.status_code == 415


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost:", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                                  b"authorization: Bearer a key\r\ncontent-type: application/json\r\n"
                                  b"content-length: 50\r\n\r\n{"])  # fmt: skip
def test_a_connection_that_sends_nothing_more_is_closed(narrow: RunningServer, sent: bytes) -> None:
    assert raw(narrow, sent, wait_s=20).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_stops_is_cut_off(narrow: RunningServer, scripted: ScriptedEngine) -> None:
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    scripted.chunks, scripted.num_given = ["x" * (1 << 20)] * 200, 0
    host, port = narrow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 20
        while scripted.num_given == 0 or narrow.serving.admission.in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert scripted.num_given < 50  # nothing was made that nobody takes
    scripted.chunks = ["a"]


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
        assert httpx.get(f"{ending.url}/ready").status_code == 200
        ending.serving.stopping.set()  # as a signal does, before the listener closes
        response = httpx.get(f"{ending.url}/ready")
        assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
        assert httpx.get(f"{ending.url}/health").status_code == 200


def test_a_busy_server_says_so(narrow: RunningServer, client: httpx.Client, scripted: ScriptedEngine) -> None:
    async def run() -> list[httpx.Response]:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=narrow.url, headers=headers, timeout=30) as many:
            body = {**COMPLETION, "n": 2, "temperature": 1}
            return await asyncio.gather(*(many.post("/v1/completions", json=body) for _ in range(12)))

    scripted.chunks, scripted.pause_s = ["a"], 0.3
    responses = asyncio.run(run())
    scripted.pause_s = 0.0
    busy = [response for response in responses if response.status_code == 503]
    assert {response.status_code for response in responses} == {200, 503}
    assert all(response.headers["retry-after"] == "1" for response in busy)
    assert error_of(busy[0])["code"] == "server_busy"
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200


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
    response = httpx.post(f"{server.url}/v1/completions", json=asked)
    assert (response.status_code, error_of(response)["code"]) == (400, "no_token_allowed")
    stream = httpx.post(f"{server.url}/v1/completions", json={**asked, "stream": True})
    assert "no_token_allowed" in stream.text


def test_long_values_do_not_come_back(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={**COMPLETION, "user_": "x" * 10_000, "temperature": "x" * 5000})
    assert response.status_code == 400
    assert len(response.content) < 3000


def test_of_many_unknown_fields_a_few_are_named() -> None:
    unknown = {f"temperature{number}": 1 for number in range(1000)}
    _, ignored = read_request({**COMPLETION, **unknown}, CompletionRequest)
    assert len(ignored) == MOST_UNKNOWN + 1
    assert ignored[0] == "unknown field 'temperature0' is ignored; did you mean temperature?"
    assert ignored[-1] == f"{1000 - MOST_UNKNOWN} more unknown fields are ignored"


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


def test_loopback_is_the_default() -> None:
    assert ServerOptions().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, ""),
        ({"host": "0.0.0.0"}, "any client that can reach 0.0.0.0"),
        ({"allowed_origin": ("*",)}, "any web page"),
        ({"allowed_origin": ("https://chat.example",)}, ""),
        ({"allowed_origin": ("*",), "host": "0.0.0.0", "api_key": (KEY,)}, ""),
    ],
    ids=str,
)
def test_a_server_that_all_may_use_without_a_key_says_so(
    options: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    bind(ServerOptions(port=0, **options)).close()
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message[: len(warned)] for message in messages] == ([warned] if warned else [])


def test_browsers_give_answers_to_pages_of_an_allowed_origin(server: RunningServer) -> None:
    page, other = {"origin": "https://chat.example"}, {"origin": "https://evil.example"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    key = {"authorization": f"Bearer {KEY}"}
    engine = ScriptedEngine(server.engine, ["a", "b"])
    with running(engine, allowed_origin=("https://chat.example",), api_key=(KEY,)) as own:
        path = f"{own.url}/v1/completions"
        asked = httpx.options(path, headers=page | preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, page["origin"])
        assert asked.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        for stream in (False, True):
            answer = httpx.post(path, json={"prompt": "x", "stream": stream}, headers=page | key, timeout=30)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
            assert answer.headers["vary"] == "origin"
        refused = httpx.post(path, json={"prompt": "x"}, headers=page)  # the page can read why
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["origin"])
        for response in (
            httpx.options(path, headers=other | preflight),
            httpx.get(f"{own.url}/v1/models", headers=other | key),
            httpx.get(f"{own.url}/v1/models", headers=key),
        ):
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("api_key", [(), (KEY,)])
@pytest.mark.parametrize("page", [{"origin": "https://chat.example"}, {"origin": "null", "host": "rebound.example"}])
def test_every_page_may_use_a_server_that_allows_every_origin(
    server: RunningServer, page: dict[str, str], api_key: tuple[str, ...]
) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    key = {"authorization": f"Bearer {KEY}"}
    with running(ScriptedEngine(server.engine, ["a"]), allowed_origin=("*",), api_key=api_key) as own:
        path = f"{own.url}/v1/completions"
        asked = httpx.options(path, headers=page | preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, "*")
        assert asked.headers["access-control-allow-headers"] == "authorization"
        answer = httpx.post(path, json={"prompt": "x"}, headers=page | key, timeout=30)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = httpx.post(path, json={"prompt": "x"}, headers=page, timeout=30)
        assert refused.status_code == (401 if api_key else 200)


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
