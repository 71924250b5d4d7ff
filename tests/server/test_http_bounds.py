"""HTTP as a client should not send it, or read it: it is refused, and its connection closed."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import psutil
import pytest
from running_server import COMPLETION, KEY, RunningServer, ScriptedEngine, running


def raw(server: RunningServer, data: bytes, wait_s: float = 5) -> bytes:
    """What comes back on a connection until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


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
    answer = raw(narrow, sent)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"invalid_request_error"' in answer


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
    assert httpx.get(f"{narrow.url}/health", timeout=60).status_code == 200


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
