"""Messages over a stream socket, each preceded by its length in four bytes, big-endian."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

LARGEST_MESSAGE = 128 * 2**20
"""Largest size in bytes. A prompt's log-probabilities for a whole vocabulary can exceed it, and are then refused."""

_LENGTH = struct.Struct(">I")


class MessageTooLargeError(ValueError):
    """Raised for a message of more than LARGEST_MESSAGE bytes."""


def frame(payload: bytes) -> bytes:
    """Return a payload prefixed with its length. Raises MessageTooLargeError."""
    check_size(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def send(sock: socket.socket, payload: bytes) -> None:
    """Send one message over a blocking socket. Raises OSError if the other end is gone, and MessageTooLargeError."""
    sock.sendall(frame(payload))


def receive(sock: socket.socket) -> bytes:
    """Wait for one message on a blocking socket and return it. Raises EOFError if the other end is gone."""
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(count - len(data))
        except OSError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def check_size(size: int) -> None:
    if size > LARGEST_MESSAGE:
        raise MessageTooLargeError(f"a message must have at most {LARGEST_MESSAGE} bytes, got {size}")


class FrameReader:
    """Splits a byte stream of length-prefixed messages into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_amid(self) -> bool:
        """Whether the newest message has been received only in part."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytearray]:
        """Return the payloads that `data` completes.

        Raises MessageTooLargeError as soon as a message that is too large begins.
        """
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            check_size(size)
            first = start + _LENGTH.size
            if len(buffer) < first + size:
                break
            start = first + size
            payloads.append(buffer[first:start])
        del buffer[:start]
        return payloads


_CHUNK = 256 * 1024

Incoming = TypeVar("Incoming")


class Connection(Generic[Incoming]):
    """One end of a connection over a non-blocking socket, which `close` closes.

    `decode` converts payloads to messages.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[bytearray], Incoming]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decode = decode
        self._frames = FrameReader()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def expects_more(self) -> bool:
        """Whether the newest message has arrived only in part."""
        return self._frames.is_amid

    def receive(self) -> list[Incoming]:
        """Return the messages that have arrived completely, possibly none. Does not wait.

        Raises EOFError if the other end has closed, OSError for a broken socket, ValueError or msgspec.DecodeError for
        data that is no message.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise EOFError("the other end has closed the connection")
        return [self._decode(payload) for payload in self._frames.feed(data)]

    def send(self, frame: bytes) -> None:
        """Send as much of a frame as the socket accepts. The rest is kept, and `flush` sends it.

        Raises OSError if the other end is gone.
        """
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send as much of the unsent data as the socket accepts. Raises the errors of `send`."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self._unsent[:sent]

    def wait_readable(self, timeout_s: float | None = None) -> bool:
        """Wait until there is data to receive, or for `timeout_s`; None waits without limit.

        Return whether there is data.
        """
        return self._poll(select.POLLIN, timeout_s)

    def wait_writable(self, timeout_s: float | None = None) -> bool:
        """Wait until the socket accepts data, or for `timeout_s`; None waits without limit.

        Return whether it accepts data.
        """
        return self._poll(select.POLLOUT, timeout_s)

    def _poll(self, events: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()
