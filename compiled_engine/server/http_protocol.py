"""HTTP connections with bounds that uvicorn lacks: on headers and framing, slow senders, and slow readers."""

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

# TCP keepalive: a client that vanished without closing is detected within minutes.
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
LINGER_S = 2.0
# Allowance for a chunk's size line and line ends.
CHUNK_HEAD_BYTES = 16
MOST_HEADERS = 128
# Bytes read at a time. About as many are buffered while a request is answered, so that a disconnect is noticed unless
# the client sends more.
READ_BYTES = 32 << 10
BLANK_LINE = b"\r\n\r\n"
REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Reading(FlowControl):
    """Flow control of a connection. After `hold`, nothing resumes reading until `release`."""

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
    """Refuses HTTP requests that arrive too slowly, have trailers, or have too many bytes outside the body.

    Bytes outside the body are headers, chunk headers and chunk extensions. The protocol also closes connections whose
    client does not read the answer, or continues a body after the answer. Requests are parsed one at a time; pipelined
    requests wait until the previous one is answered.

    Subclasses set the class attributes, since uvicorn creates the instances.
    """

    limits: Limits
    connections_here: Connections  # all connections of this process
    buffer: memoryview  # read buffer, used by one connection at a time

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.access_log = False  # see RequestScope
        self._unparsed = b""
        self._before = b""  # the last bytes parsed, with which a blank line may begin
        self._body_left: int | None = None  # remaining bytes of a body with a declared length
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
        """Whether a complete request has arrived and its answer is not written yet."""
        return self._reads_headers and self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parse the buffered data up to the end of the first request that is not answered yet."""
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
            self._expect_request()  # bytes that begin no request, such as line ends

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return the offset in `data` of the end of the next piece: where a request may end, or the end of the data."""
        if not self._reads_headers and self._body_left is not None:
            return min(start + self._body_left, len(data))
        seen = self._before + data[start : start + len(BLANK_LINE)]
        place = seen.find(BLANK_LINE)
        if place >= 0:
            return start + place + len(BLANK_LINE) - len(self._before)
        place = data.find(BLANK_LINE, start)
        return len(data) if place < 0 else place + len(BLANK_LINE)

    def _feed(self, piece: bytes) -> None:
        """Parse a piece. Unlike uvicorn, log neither invalid HTTP nor upgrades."""
        self._before = (self._before + piece[1 - len(BLANK_LINE) :])[1 - len(BLANK_LINE) :]
        self._bytes_beside_body += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request must be valid HTTP/1.1"))
        except httptools.HttpParserUpgrade:
            pass  # answered like any other request
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
        raise ValueError("refused")  # stops the parser

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
        """Send the error unless an answer has begun, and close the connection.

        If the error was sent, the client has LINGER_S to read it and close first; with TLS, the connection is closed at
        once.
        """
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
            self.transport.write_eof()  # closing with unread input would discard the answer
            self._linger = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _cancel_timers(self) -> None:
        for timer in (self._receiving, self._writing, self._linger):
            if timer is not None:
                timer.cancel()


def bounded_protocol(limits: Limits, connections: Connections) -> type[BoundedProtocol]:
    """Return a subclass of BoundedProtocol with these limits and connections. uvicorn creates its instances."""
    shared = {"limits": limits, "connections_here": connections, "buffer": memoryview(bytearray(READ_BYTES))}
    return type("BoundedProtocol", (BoundedProtocol,), shared)


def probe_when_idle(connection: socket.socket | None) -> None:
    """Enable TCP keepalive, which closes an idle connection whose client has vanished."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
