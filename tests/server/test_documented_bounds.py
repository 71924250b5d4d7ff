"""The bounds that docs/security.md lists, each tried at its edge: what is at the bound passes, what is beyond does not.

A row of the page has a trial of the same name here, and the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest
from folders import REPOSITORY
from running_server import RunningServer, error_of, running
from test_pulse import StandsStill
from tiny_tokenizers import byte_level

from compiled_engine.engine.messages import RequestLimits
from compiled_engine.features.pooling.frontend.processor import PoolingProcessor
from compiled_engine.pooling import EMBED, LAST, NONE, Pooling
from compiled_engine.server.errors import ApiError
from compiled_engine.server.http_protocol import MOST_HEADERS
from compiled_engine.server.json_size import MOST_CONTAINERS, MOST_KEYS
from compiled_engine.server.long_work import MOST_LARGE, MOST_SMALL
from compiled_engine.server.options import Limits
from compiled_engine.server.pooling import bounds_of
from compiled_engine.server.sampling_fields import MOST_ALLOWED, MOST_EXTRA_BYTES

SECONDS = 0.8
LIMITS = Limits(
    max_body_bytes=4 << 20, max_header_bytes=3000, max_json_depth=9, max_json_values=300_000, max_connections=6,
    max_completions=128, max_inputs=3, max_in_flight=130, max_answer_tokens=20, max_logprobs=5, max_logprob_entries=100,
    max_pooled_values=40, max_stop=4, max_stop_length=16, max_token_list=8, max_messages=4, max_tools=2,
    receive_timeout=SECONDS, write_timeout=SECONDS, keep_alive_timeout=SECONDS, render_timeout=SECONDS,
    health_timeout=SECONDS,
)  # fmt: skip
MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def rows() -> list[str]:
    """The bounds that the page lists: the first cell of each row, without its marks."""
    section = (REPOSITORY / "docs" / "security.md").read_text().partition("\n## Bounds\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return [cell.strip("`") for cell in cells if cell != "bound" and not re.fullmatch("-+", cell)]


@pytest.fixture(scope="module")
def narrow(server: RunningServer) -> Iterator[RunningServer]:
    with running(StandsStill(server.engine, ["a"]), limits=LIMITS) as narrow:
        yield narrow


Trial = Callable[[RunningServer], tuple[bool, bool]]
"""Whether what is at the bound passes, and whether what is beyond it does."""


def passes(server: RunningServer, path: str, body: Any, status: int) -> bool:
    """Whether a request is not refused with this status for a bound. This engine has no log-probabilities, and this
    model no tools: requests with them fail later."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
    if response.status_code == 200:
        return True
    reasons = ("at most", "from 0 to", "server_busy")
    refused = response.status_code == status and any(reason in response.text for reason in reasons)
    assert refused or response.status_code == 500 or "not supported" in response.text, response.text
    return not refused


def posted(make: Callable[[int], Any], most: int, path: str = COMPLETIONS, status: int = 400) -> Trial:
    """make: the body of this size, or fields of a completion."""

    def try_it(server: RunningServer) -> tuple[bool, bool]:
        def body(size: int) -> Any:
            made = make(size)
            if isinstance(made, bytes):
                return made
            return ({"messages": [MESSAGE]} if path == CHAT else {"prompt": "x", "max_tokens": 1}) | made

        at, beyond = (passes(server, path, body(size), status) for size in (most, most + 1))
        return at, beyond

    return try_it


def raw(server: RunningServer, *sent: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back on a connection until the server closes it, or has answered."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection, contextlib.suppress(ConnectionError):
        for part in sent:
            connection.sendall(part)
            time.sleep(pause_s)
        while b"\r\n\r\n" not in received and (chunk := connection.recv(1 << 16)):
            received += chunk
    return received


def headers_of(size: int) -> bytes:
    """A request whose target and headers have so many bytes, without what separates them."""
    return b"GET /health HTTP/1.1\r\nhost: x\r\na: %s\r\n\r\n" % (b"x" * (size - len("/healthhostxa")))


def header_bytes(server: RunningServer) -> tuple[bool, bool]:
    at, beyond = (
        b" 200 " in raw(server, headers_of(size)) for size in (LIMITS.max_header_bytes, LIMITS.max_header_bytes + 1)
    )
    return at, beyond


def header_count(server: RunningServer) -> tuple[bool, bool]:
    head = b"GET /health HTTP/1.1\r\n"
    at, beyond = (
        b" 200 " in raw(server, head + b"a: b\r\n" * count + b"\r\n") for count in (MOST_HEADERS, MOST_HEADERS + 1)
    )
    return at, beyond


def receiving(server: RunningServer) -> tuple[bool, bool]:
    sent = b"GET /health HTTP/1.1\r\n", b"\r\n"
    return b" 200 " in raw(server, *sent), b" 200 " in raw(server, *sent, pause_s=2 * SECONDS)


def keeping_alive(server: RunningServer) -> tuple[bool, bool]:
    def second_is_answered(pause_s: float) -> bool:
        host, port = server.url.removeprefix("http://").split(":")
        get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(get)
            assert b" 200 " in connection.recv(1 << 16)
            time.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                connection.sendall(get)
                return b" 200 " in connection.recv(1 << 16)
            return False

    return second_is_answered(0), second_is_answered(2 * SECONDS)


def unread(server: RunningServer) -> tuple[bool, bool]:
    """A stream whose client stops to read."""
    asked = b'{"prompt":"x","max_tokens":1,"stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    before = server.engine.chunks
    server.engine.chunks = ["x" * (1 << 20)] * 30

    def is_whole(pause_s: float) -> bool:
        received = b""
        with (
            socket.create_connection((host, int(port)), timeout=20) as connection,
            contextlib.suppress(ConnectionError),
        ):
            connection.sendall(head % len(asked) + asked)
            time.sleep(pause_s)
            while not received.endswith(b"0\r\n\r\n") and (chunk := connection.recv(1 << 20)):
                received += chunk[-9:] if len(chunk) > 9 else chunk
        return received.endswith(b"0\r\n\r\n")

    try:
        return is_whole(0), is_whole(3 * SECONDS)
    finally:
        server.engine.chunks = before


def connections(server: RunningServer) -> tuple[bool, bool]:
    """Whether the one that waits longest stays."""

    def first_stays(count: int) -> bool:
        host, port = server.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(count)
            ]
            opened[-1].sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert b" 200 " in opened[-1].recv(1 << 16)
            opened[0].setblocking(False)
            try:
                return opened[0].recv(1) != b""
            except BlockingIOError:
                return True
            except ConnectionError:
                return False

    time.sleep(0.3)  # those of other trials have gone
    return first_stays(LIMITS.max_connections), first_stays(LIMITS.max_connections + 1)


def health(server: RunningServer) -> tuple[bool, bool]:
    def is_healthy() -> bool:
        return httpx.get(f"{server.url}/health", timeout=20).status_code == 200

    at = is_healthy()
    server.engine.stands_still = True
    try:
        deadline = time.monotonic() + 20
        while (beyond := is_healthy()) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        server.engine.stands_still = False
    while not is_healthy():
        time.sleep(0.1)
    return at, beyond


def in_loop(server: RunningServer, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)


def working(server: RunningServer) -> tuple[bool, bool]:
    async def is_done(seconds: float) -> bool:
        try:
            await server.serving.texts.run("prompt", 1, lambda: time.sleep(seconds))
        except ApiError as error:
            return error.status != 400
        return True

    return in_loop(server, is_done(0)), in_loop(server, is_done(2 * SECONDS))


def queueing(size: int, most: int) -> Trial:
    def try_it(server: RunningServer) -> tuple[bool, bool]:
        go_on = threading.Event()

        async def run() -> tuple[bool, bool]:
            texts = server.serving.texts
            waiting = [asyncio.ensure_future(texts.run("prompt", size, lambda: go_on.wait(20))) for _ in range(most)]
            await asyncio.sleep(0)
            try:
                await texts.run("prompt", size, lambda: None)
                beyond = True
            except ApiError as error:
                beyond = error.status != 503
            at = not any(each.done() for each in waiting)
            for each in waiting:
                each.cancel()
            go_on.set()
            await asyncio.gather(*waiting, return_exceptions=True)
            return at, beyond

        return in_loop(server, run())

    return try_it


def in_flight(server: RunningServer) -> tuple[bool, bool]:
    with server.serving.admission.admit(LIMITS.max_in_flight - 4):
        return posted(lambda n: {"n": n, "temperature": 1}, 4, status=503)(server)


def inputs(server: RunningServer) -> tuple[bool, bool]:
    def has_few(count: int) -> bool:
        response = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["x"] * count}, timeout=60)
        return "at most" not in error_of(response)["message"]  # this model does not pool; the number is judged first

    return has_few(LIMITS.max_inputs), has_few(LIMITS.max_inputs + 1)


def pooled(make: Callable[[PoolingProcessor, int], Any], most: int) -> Trial:
    def try_it(server: RunningServer) -> tuple[bool, bool]:
        def is_taken(size: int) -> bool:
            limits = RequestLimits(400, 1 << 20, 1 << 20, yields_tokens=False)
            with contextlib.suppress(ValueError):
                make(PoolingProcessor(byte_level(), limits, Pooling(EMBED, LAST, (), NONE), 1), size)
                return True
            return False

        return is_taken(most), is_taken(most + 1)

    return try_it


def nested(depth: int) -> bytes:
    return b'{"prompt":"x","max_tokens":1,"metadata":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def many(value: bytes, count: int) -> bytes:
    return b'{"prompt":"x","max_tokens":1,"metadata":[' + b",".join([value] * count) + b"]}"


def keys(count: int) -> bytes:
    inner = b",".join(b'"%d":1' % i for i in range(count - 3))
    return b'{"prompt":"x","max_tokens":1,"metadata":{' + inner + b"}}"


def padded(size: int) -> bytes:
    body = b'{"prompt":"x","max_tokens":1}'
    return body + b" " * (size - len(body))


TRIALS: dict[str, Trial] = {
    "--max-body-bytes": posted(padded, LIMITS.max_body_bytes, status=413),
    "--max-header-bytes": header_bytes,
    "headers": header_count,
    "--max-json-depth": posted(nested, LIMITS.max_json_depth),
    # The values of many(): the prompt, max_tokens and its list, so that many commas.
    "--max-json-values": posted(lambda count: many(b"1", count - 2), LIMITS.max_json_values),
    "arrays and objects": posted(lambda count: many(b"[]", count - 2), MOST_CONTAINERS),
    "keys": posted(keys, MOST_KEYS),
    "--receive-timeout": receiving,
    "--write-timeout": unread,
    "--keep-alive-timeout": keeping_alive,
    "--render-timeout": working,
    "--health-timeout": health,
    "large work that waits": queueing(1 << 20, MOST_LARGE),
    "small work that waits": queueing(1, MOST_SMALL),
    "--max-connections": connections,
    "--max-in-flight": in_flight,
    "--max-completions": posted(lambda n: {"n": n, "temperature": 1}, LIMITS.max_completions),
    "--max-inputs": inputs,
    "--max-answer-tokens": posted(lambda count: {"max_tokens": count}, LIMITS.max_answer_tokens),
    "--max-logprobs": posted(lambda count: {"logprobs": count}, LIMITS.max_logprobs),
    "--max-logprob-entries": posted(lambda n: {"n": n, "max_tokens": 5, "logprobs": 4, "temperature": 1}, 4),
    "--max-pooled-values": pooled(
        lambda processor, count: processor.process([[5]] * count, bounds=bounds_of(LIMITS)), LIMITS.max_pooled_values
    ),
    "characters of pairs": pooled(
        lambda processor, size: processor.score(
            "x" * 9, ["x" * (size - 20), "yy"], bounds=bounds_of(Limits(max_body_bytes=999))
        ),
        999,
    ),
    "--max-stop": posted(lambda count: {"stop": ["b"] * count}, LIMITS.max_stop),
    "--max-stop-length": posted(lambda size: {"stop": "b" * size}, LIMITS.max_stop_length),
    "--max-token-list": posted(lambda count: {"stop_token_ids": list(range(count))}, LIMITS.max_token_list),
    "--max-messages": posted(lambda count: {"messages": [MESSAGE] * count}, LIMITS.max_messages, CHAT),
    "--max-tools": posted(lambda count: {"tools": [TOOL] * count}, LIMITS.max_tools, CHAT),
    "allowed tokens": posted(
        lambda size: {"n": 128, "allowed_token_ids": list(range(-(-size // 128))), "temperature": 1}, MOST_ALLOWED
    ),
    "extra arguments": posted(lambda size: {"extra_args": {"a": "b" * (size - len('{"a": ""}'))}}, MOST_EXTRA_BYTES),
}


def test_the_page_lists_each_bound_that_is_tried() -> None:
    assert sorted(rows()) == sorted(TRIALS)


def test_the_page_lists_each_limit() -> None:
    assert [name for each in fields(Limits) if (name := f"--{each.name.replace('_', '-')}") not in rows()] == []


@pytest.mark.parametrize("bound", TRIALS)
def test_a_bound_is_where_the_page_says(bound: str, narrow: RunningServer) -> None:
    assert TRIALS[bound](narrow) == (True, False)
