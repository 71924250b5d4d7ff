"""One end of the socket between an API process and the core: messages in, frames out, never waiting."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from compiled_engine.core_process.frames import FrameReader

_CHUNK = 256 * 1024

Incoming = TypeVar("Incoming")


class Connection(Generic[Incoming]):
    """Owns a stream socket. `decode` turns a payload into a message."""

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

    def receive(self) -> list[Incoming]:
        """The messages that have come.

        Raises EOFError when the other end has closed, OSError for a broken socket, ValueError or msgspec.DecodeError
        for what is no message.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise EOFError("the other end has closed the connection")
        return [self._decode(payload) for payload in self._frames.feed(data)]

    def send(self, frame: bytes) -> None:
        """Send as much as the socket takes; `flush` sends the rest. Raises OSError if the other end is gone."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what is left, as much as the socket takes. Raises as `send`."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self._unsent[:sent]

    def wait_readable(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something to receive; False after `timeout_s`."""
        return self._poll(select.POLLIN, timeout_s)

    def wait_writable(self, timeout_s: float | None = None) -> bool:
        """Wait until the socket takes more; False after `timeout_s`."""
        return self._poll(select.POLLOUT, timeout_s)

    def _poll(self, events: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """May be called again."""
        self._socket.close()
