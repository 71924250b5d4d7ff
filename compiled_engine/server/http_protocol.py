"""HTTP connections with bounds that uvicorn's own lack: on what is not body, on slow senders, and on slow readers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from compiled_engine.server.connections import Connections
from compiled_engine.server.errors import ApiError
from compiled_engine.server.options import Limits

# Probes of a connection on which nothing happens: a client that is gone without a word is found out within minutes.
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
LINGER_S = 2.0
# The size before each chunk of a body, and the ends of its lines.
CHUNK_HEAD_BYTES = 16
MOST_HEADERS = 128
# Bytes that are read at a time. Of what a client sends before its request is answered, about as much waits here: so the
# server learns of its end, unless it sends more.
READ_BYTES = 32 << 10
BLANK_LINE = b"\r\n\r\n"
REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Reading(FlowControl):
    """A connection's flow. While it is held, nothing is read, whoever wants to resume."""

    held = False

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        self.held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Refuses a request with too many bytes besides its body, with trailers, or that does not arrive in time.
    Closes a connection if its client does not read, or continues a body after the answer.

    The bytes besides a body are headers, the heads of chunks, and their extensions. One request at a time is parsed:
    what follows it waits until it has been answered.

    limits: of the server. connections: all of the process. buffer: for what is read, used by one connection at a time.
    Subclasses set them, since uvicorn makes the objects.
    """

    limits: Limits
    connections_here: Connections
    buffer: memoryview

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.access_log = False  # see RequestScope
        self._unparsed = b""
        self._before = b""  # the last bytes that were parsed: a blank line may begin with them
        self._body_left: int | None = None  # of a body with a declared length
        self._bytes_beside_body = 0
        self._reads_headers = True
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = self._reading = Reading(transport)
        self.connections_here.wait(self, transport.abort)
        probe_when_idle(transport.get_extra_info("socket"))
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        self._unparsed = b""
        self.connections_here.end(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed += self.buffer[:nbytes]
        self._parse()

    @property
    def _is_answering(self) -> bool:
        """Whether a request has arrived as a whole, and its answer has not been written."""
        return self._reads_headers and self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parse what has come, up to the end of a request that is not answered."""
        data, start = self._unparsed, 0
        while start < len(data) and not (self._refused or self._is_answering or self.transport.is_closing()):
            end = self._end_of_piece(data, start)
            self._feed(data[start:end])
            start = end
        self._unparsed = data[start:]
        if len(self._unparsed) > READ_BYTES:
            self._reading.hold()
        elif self._reading.held:
            self._reading.release()
        if self._receiving is None and not self._is_answering:
            self._expect_request()  # bytes have come that begin none, such as line ends

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return where the next piece ends: at a place where a request may end, or with the data."""
        if not self._reads_headers and self._body_left is not None:
            return min(start + self._body_left, len(data))
        seen = self._before + data[start : start + len(BLANK_LINE)]
        place = seen.find(BLANK_LINE)
        if place >= 0:
            return start + place + len(BLANK_LINE) - len(self._before)
        place = data.find(BLANK_LINE, start)
        return len(data) if place < 0 else place + len(BLANK_LINE)

    def _feed(self, piece: bytes) -> None:
        """Parse as uvicorn does, without a log line for invalid HTTP or upgrades."""
        self._before = (self._before + piece[1 - len(BLANK_LINE) :])[1 - len(BLANK_LINE) :]
        self._bytes_beside_body += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request must be valid HTTP/1.1"))
        except httptools.HttpParserUpgrade:
            pass  # it is answered like any other
        if self._bytes_beside_body > self.limits.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_headers and len(self.headers) < MOST_HEADERS:
            super().on_header(name, value)
            return
        if self._reads_headers:
            self._refuse(ApiError(431, f"there must be at most {MOST_HEADERS} headers"))
        else:
            self._refuse(ApiError(400, "there must be no headers after the body"))
        raise ValueError("refused")  # which ends the parser's work

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        self._reads_headers = False
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), None)
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refuse_headers()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        if self._linger is not None and not self._refused:
            self._linger.cancel()
            self._linger = None
        self._reads_headers = True
        self._bytes_beside_body = 0
        self._before = b""
        if self.cycle is not None:
            super().on_message_complete()
        if self._is_answering:
            self.connections_here.work(self)

    def on_body(self, body: bytes) -> None:
        if self._body_left is not None:
            self._body_left -= len(body)
        self._bytes_beside_body = max(self._bytes_beside_body - len(body) - CHUNK_HEAD_BYTES, 0)
        if self.cycle is not None:
            super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.connections_here.wait(self, self.transport.abort)
        if not self._reads_headers and self._linger is None:
            self._linger = self.loop.call_later(LINGER_S, self.transport.abort)
        if self._unparsed:
            self._unset_keepalive_if_required()
            self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _expect_request(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_later(self.limits.receive_timeout, self._took_too_long)

    def _took_too_long(self) -> None:
        self._refuse(ApiError(408, f"the request must arrive within {self.limits.receive_timeout:g} s"))

    def _refuse_headers(self) -> None:
        self._refuse(ApiError(431, f"headers must have at most {self.limits.max_header_bytes} bytes"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has begun, and close once the client has read it, or does not."""
        if self.transport.is_closing() or self._refused:
            return
        self._refused = True
        cycle = self.cycle
        idle = cycle is None or (cycle.response_complete and self._reads_headers)
        if not (idle or (cycle is not None and not cycle.response_started)):
            self.transport.close()
            return
        if cycle is not None:  # the handler has lost its client
            cycle.disconnected = True
            cycle.message_event.set()
        body = error.body()
        reason = REASONS.get(error.status, b"Bad Request")
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        head %= error.status, reason, len(body)
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        if self._linger is not None:
            self._linger.cancel()
        if self.transport.can_write_eof():
            self.transport.write_eof()  # a close would throw the answer away where more has been sent than read
            self._linger = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _cancel_timers(self) -> None:
        for timer in (self._receiving, self._writing, self._linger):
            if timer is not None:
                timer.cancel()


def bounded_protocol(limits: Limits, connections: Connections) -> type[BoundedProtocol]:
    """Return the class of a server's connections, see BoundedProtocol."""
    shared = {"limits": limits, "connections_here": connections, "buffer": memoryview(bytearray(READ_BYTES))}
    return type("BoundedProtocol", (BoundedProtocol,), shared)


def probe_when_idle(connection: socket.socket | None) -> None:
    """Have the system find out whether the other end is still there."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
