"""Connections of a server: how many, what each holds, and what they write to the log."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_server import RunningServer, ScriptedEngine, running

from compiled_engine.server.connections import Connections, connections_of_a_process
from compiled_engine.server.http_protocol import READ_BYTES
from compiled_engine.server.options import Limits

MOST = 8
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LIMITS = Limits(max_connections=MOST, receive_timeout=20.0, keep_alive_timeout=20.0, write_timeout=20.0)


@pytest.fixture(scope="module")
def scripted(server: RunningServer) -> ScriptedEngine:
    return ScriptedEngine(server.engine, ["a"])


@pytest.fixture(scope="module")
def few(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server with few connections."""
    with running(scripted, limits=LIMITS) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answers(connection: socket.socket, count: int) -> bytes:
    """What comes until there are so many answers."""
    received = b""
    while received.count(b"HTTP/1.1 ") < count or not received.endswith(b"}"):
        chunk = connection.recv(1 << 16)
        assert chunk, received[-500:]
        received += chunk
    return received


def is_closed(connection: socket.socket, wait_s: float = 5) -> bool:
    """Whether the server has ended a connection that has nothing to be read."""
    if not select.select([connection], [], [], wait_s)[0]:
        return False
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@given(st.lists(st.integers(1, 60), max_size=12), st.data())
def test_requests_one_after_the_other_however_they_arrive(
    few: RunningServer, sizes: list[int], data: st.DataObject
) -> None:
    """Bodies with blank lines and with what looks like a request, in chunks or not."""
    body = b'{"prompt": "x", "max_tokens": 1}' + b"\r\n\r\n" * 3
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0;a=b\r\n\r\n" % (len(body), body)
    wrong = head + b"content-length: %d\r\n\r\n%s" % (len(GET), GET)
    kinds = [(GET, b"200"), (b"\r\n" + GET, b"200"), (whole, b"200"), (chunked, b"200"), (wrong, b"400")]
    asked = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    sent = b"".join(request for request, _ in asked)
    with connect(few) as connection:
        for size in sizes:
            connection.sendall(sent[:size])
            sent = sent[size:]
        connection.sendall(sent)
        received = answers(connection, len(asked))
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [status for _, status in asked]


def test_what_is_written_is_sent_at_once(few: RunningServer) -> None:
    """Nagle's algorithm would hold back the second part of an answer until the client has acknowledged the first."""
    with connect(few) as connection:
        connection.sendall(GET)
        answers(connection, 1)
        (protocol,) = few.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_whose_answers_are_not_read_hold_no_memory(few: RunningServer) -> None:
    """Another client is answered, and of the requests behind an unread answer as much is taken as one read has."""
    before = psutil.Process().memory_info().rss
    with connect(few) as connection:
        connection.setblocking(False)
        sent, deadline = 0, time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([], [connection], [], 1)[1]:
                break  # nothing more is taken
            sent += connection.send(GET * 4000)
            assert httpx.get(f"{few.url}/health", timeout=20).status_code == 200
        else:
            pytest.fail("the server reads on")
        assert psutil.Process().memory_info().rss - before < 20 << 20


@pytest.mark.parametrize(
    "request_", [GET, b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], ids=["plain", "chunked"]
)
def test_one_request_at_a_time_is_parsed(few: RunningServer, monkeypatch: pytest.MonkeyPatch, request_: bytes) -> None:
    pieces: list[int] = []
    kind = few.server.config.http_protocol_class
    original = kind._feed  # type: ignore[union-attr]

    def feed(self: Any, piece: bytes) -> None:
        pieces.append(piece.count(b" HTTP/1.1\r\n"))
        original(self, piece)

    monkeypatch.setattr(kind, "_feed", feed)
    with connect(few) as connection:
        connection.sendall(request_ * 500)
        answers(connection, 500)
    assert sum(pieces) == 500
    assert max(pieces) == 1


def test_a_client_that_goes_behind_another_request_ends_its_first(server: RunningServer) -> None:
    asked = b'{"prompt": "x", "max_tokens": 200, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head % len(asked) + asked + GET * (READ_BYTES // len(GET) // 2))
        until(lambda: server.engine.num_unfinished > 0)
    until(lambda: server.engine.num_unfinished == 0)


def test_a_new_connection_replaces_the_one_that_waits_longest(few: RunningServer, scripted: ScriptedEngine) -> None:
    scripted.pause_s = 1.5
    asked = b'{"prompt": "x", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with contextlib.ExitStack() as stack:
        try:
            at_work = stack.enter_context(connect(few))
            at_work.sendall(head % len(asked) + asked)
            until(lambda: few.serving.admission.in_flight == 1)
            first, *others = [stack.enter_context(connect(few)) for _ in range(MOST - 1)]
            for each in (first, *others):
                each.sendall(GET[:20])
            first.sendall(GET[20:])
            answers(first, 1)  # so now another one waits longest
            assert httpx.get(f"{few.url}/health", timeout=20).status_code == 200
            assert is_closed(others[0])
            assert not any(is_closed(each, 0) for each in (at_work, first, *others[1:]))
            assert b" 200 " in answers(at_work, 1)
        finally:
            scripted.pause_s = 0.0


def test_where_all_connections_are_at_work_no_other_is_taken(few: RunningServer, scripted: ScriptedEngine) -> None:
    scripted.pause_s = 1.5
    asked = b'{"prompt": "x", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with contextlib.ExitStack() as stack:
        try:
            at_work = [stack.enter_context(connect(few)) for _ in range(MOST)]
            for each in at_work:
                each.sendall(head % len(asked) + asked)
            until(lambda: few.serving.admission.in_flight == MOST)
            assert is_closed(stack.enter_context(connect(few)))
            assert all(b" 200 " in answers(each, 1) for each in at_work)
        finally:
            scripted.pause_s = 0.0
    assert httpx.get(f"{few.url}/health", timeout=20).status_code == 200


def test_a_burst_of_connections_leaves_the_last(few: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connect(few)) for _ in range(10 * MOST)]
        many[-1].sendall(GET)
        assert b" 200 " in answers(many[-1], 1)
        until(lambda: sum(is_closed(each, 0) for each in many[:-1]) >= 9 * MOST)


def test_many_headers_hold_no_memory(few: RunningServer) -> None:
    """Many empty ones would take more than ten times their bytes."""
    before = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(connect(few))
            with contextlib.suppress(ConnectionError):
                connection.sendall(GET[:-2] + b"a:\r\n" * 7500)
    assert psutil.Process().memory_info().rss - before < 20 << 20


def test_without_a_file_for_a_connection_the_log_has_a_line_a_second(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(ScriptedEngine(server.engine)) as short, contextlib.ExitStack() as stack:
        host, port = short.url.removeprefix("http://").split(":")
        used = psutil.Process().num_fds()
        try:
            clients = [stack.enter_context(socket.socket()) for _ in range(50)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
            for client in clients:
                client.connect((host, int(port)))
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert httpx.get(f"{short.url}/health", timeout=20).status_code == 200
    assert 1 <= len(caplog.records) <= 5


@pytest.mark.parametrize(
    ("files", "processes", "most"), [(20_000, 1, 8192), (20_000, 3, 2731), (1024, 1, 768), (300, 1, 150)]
)
def test_connections_leave_files_for_others(
    files: int, processes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    assert connections_of_a_process(8192, processes) == most


@given(st.lists(st.tuples(st.sampled_from(["begin", "wait", "work", "end"]), st.integers(0, 9))))
def test_connections_are_counted(steps: list[tuple[str, int]]) -> None:
    count = [0]
    connections = Connections(4, lambda change: count.__setitem__(0, count[0] + change))
    opened: list[int] = []  # in the order in which they began to wait
    working: set[int] = set()
    for step, number in steps:
        known = number in opened or number in working
        if step == "begin" and not known:
            full = len(opened) + len(working) == 4
            assert connections.begin(number, lambda: None) != (full and not opened)
            if full and opened:
                opened.pop(0)
            if not full or len(opened) + len(working) < 4:
                opened.append(number)
        elif step == "wait":
            connections.wait(number, lambda: None)
            if number in working:
                working.remove(number)
                opened.append(number)
        elif step == "work":
            connections.work(number)
            if number in opened:
                opened.remove(number)
                working.add(number)
        elif step == "end":
            connections.end(number)
            opened = [each for each in opened if each != number]
            working.discard(number)
        assert len(connections) == count[0] == len(opened) + len(working)


def test_the_log_has_no_line_that_anybody_can_write(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """With a key: refused requests, and those that need none. Without one, a path is cut."""
    with running(ScriptedEngine(server.engine), api_key=("key",), uvicorn_log_level="info") as asking:
        for path in ("/v1/models", "/" + "x" * 20_000, "/health?" + "x" * 20_000, "/"):
            httpx.get(asking.url + path, timeout=60)
        httpx.options(f"{asking.url}/v1/models", headers={"origin": "https://a.example"}, timeout=60)
        assert (
            httpx.get(f"{asking.url}/v1/models?a=b", headers={"authorization": "Bearer key"}, timeout=60).status_code
            == 200
        )
    lines = [line for line in capsys.readouterr().out.splitlines() if "HTTP/" in line]
    assert len(lines) == 1
    assert '"GET /v1/models?a=b HTTP/1.1" 200' in lines[0]
    with running(ScriptedEngine(server.engine), uvicorn_log_level="info") as open_to_all:
        httpx.get(f"{open_to_all.url}/" + "x" * 20_000, timeout=60)
    lines = [line for line in capsys.readouterr().out.splitlines() if "xxx" in line]
    assert len(lines) == 1
    assert len(lines[0]) < 400


def test_the_parser_ends_headers_only_at_a_blank_line_of_carriage_returns() -> None:
    """Requests are told apart by that."""
    for ends in (b"\n\n", b"\r\n\n", b"\n\r\n"):
        with pytest.raises(httptools.HttpParserError):
            httptools.HttpRequestParser(object()).feed_data(b"GET / HTTP/1.1\r\na: b" + ends + b"GET")
