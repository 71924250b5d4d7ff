"""Messages through sockets, whole and within bounds, and results of steps as bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from left_over import SOON_S

from compiled_engine.engine.control import Failed
from compiled_engine.engine.messages import RunnerOutput
from compiled_engine.processes import channel, ring
from compiled_engine.processes.channel import Connection, FrameReader, MessageTooLargeError, frame, receive, send
from compiled_engine.processes.ring import RingDescriptors, RingReader, RingWriter
from compiled_engine.processes.wire import decode_result, encode_result

Ends = tuple[Connection[bytearray], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return a connection whose messages are plain bytes, and the other end."""
    own, other = socket.socketpair()
    connection: Connection[bytearray] = Connection(own, lambda payload: payload)
    with other:
        yield connection, other
    connection.close()
    connection.close()  # once more


def test_a_message_may_have_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides refuse a longer message, and a receiver does so before its bytes arrive."""
    monkeypatch.setattr(channel, "LARGEST_MESSAGE", 5)
    assert frame(b"12345") == b"\0\0\0\x0512345"
    with pytest.raises(MessageTooLargeError, match="a message must have at most 5 bytes, got 6"):
        frame(b"123456")
    assert FrameReader().feed(b"\0\0\0\x0512345") == [b"12345"]
    with pytest.raises(MessageTooLargeError):
        FrameReader().feed(b"\0\0\0\x06")


def test_blocking_ends_wait_for_whole_messages() -> None:
    own, other = socket.socketpair()
    sender = threading.Thread(target=lambda: [send(other, bytes(1 << 20)), send(other, b""), other.close()])
    sender.start()
    assert receive(own) == bytes(1 << 20)
    assert receive(own) == b""
    with pytest.raises(EOFError):
        receive(own)
    sender.join()
    own.close()
    with pytest.raises(EOFError):  # also from one that is broken
        receive(own)


def test_a_message_that_is_cut_off_is_an_end() -> None:
    own, other = socket.socketpair()
    other.sendall(b"\0\0\0\x05123")
    other.close()
    with pytest.raises(EOFError):
        receive(own)
    own.close()


def test_a_connection_never_waits_unless_it_is_told_to(ends: Ends) -> None:
    connection, other = ends
    assert connection.receive() == []
    begun = time.monotonic()
    assert not connection.wait_readable(0.05)
    assert 0.05 <= time.monotonic() - begun < SOON_S
    assert connection.wait_writable(0.0)
    other.sendall(frame(b"a") + frame(b"bc") + b"\0\0")
    assert connection.wait_readable(SOON_S)
    assert connection.receive() == [b"a", b"bc"]
    other.sendall(b"\0\x01d")
    assert connection.receive() == [b"d"]
    threading.Timer(0.05, other.sendall, (b"x",)).start()
    assert connection.wait_readable()
    assert connection.receive() == []
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        connection.receive()


def test_what_a_socket_does_not_take_is_sent_later(ends: Ends) -> None:
    """It stays in order with later messages."""
    connection, other = ends
    sent = bytes(range(256)) * (1 << 13)
    assert not connection.has_unsent
    connection.send(sent)
    assert connection.has_unsent
    assert not connection.wait_writable(0.01)
    connection.send(b"end")
    found = bytearray()
    while connection.has_unsent:
        found += other.recv(1 << 20)
        connection.flush()
    while len(found) < len(sent) + 3:
        found += other.recv(1 << 20)
    assert found == sent + b"end"
    other.close()
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system says
        connection.send(b"x")


def test_results_of_steps_are_told_from_failures() -> None:
    for result in (RunnerOutput((5, 6), lengths=[2]), Failed("KeyError", "'a'", "line 7")):
        found = decode_result(encode_result(result))
        assert type(found) is type(result)
    failed = decode_result(encode_result(Failed("KeyError", "'a'", "line 7")))
    assert failed == Failed("KeyError", "'a'", "line 7")


def test_a_reader_stays_awake_only_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    class Bells:
        def __init__(self, *answers: bool) -> None:
            self.answers = list(answers)

        def poll(self, *timeout: int) -> list[int]:
            looks.append(timeout)
            return [1] if not timeout or self.answers.pop(0) else []

    bells: object = Bells(False, True)
    ring.await_bell(bells, 60.0)  # type: ignore[arg-type]
    assert looks == [(0,), (0,)]
    looks.clear()
    ring.await_bell(bells, 0.0)  # type: ignore[arg-type]
    assert looks == [()]


def test_what_was_taken_in_is_read_later_in_order() -> None:
    """The writer gets its room back."""
    rings = RingDescriptors.make(1, 32)
    full: list[int] = []

    def no_room() -> None:
        full.append(1)
        reader.take_in()

    reader, writer = RingReader(rings), RingWriter(rings, no_room)
    assert not reader.take_in()
    messages = [bytes([number]) * 11 for number in range(5)]
    for message in messages:
        writer.write(message)
    assert full
    while reader.take_in():
        pass
    assert [reader.read(lambda: pytest.fail("everything is there")) for _ in messages] == messages
    reader.close()
    writer.close()
    rings.close()
