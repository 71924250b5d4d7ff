"""HTTP/1.1 connections of a load test: as little work for each piece of an answer as there can be.

asyncio's protocols and httptools' parser: a load test that reads thousands of streams through a client library measures
that library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import httptools

from compiled_engine.bench.serving.target import Target

# A part of an answer's body, and the time at which it arrived.
OnBody = Callable[[bytes, float], None]


class ConnectionLost(Exception):
    """The server has closed the connection before the answer was complete. had_begun: some of it was there."""

    def __init__(self, reason: str, had_begun: bool) -> None:
        super().__init__(reason)
        self.had_begun = had_begun


class Connection(asyncio.Protocol):
    """Asks one request after the other."""

    def __init__(self) -> None:
        self.is_open = True
        self.status = 0
        self.num_requests = 0
        self._now = 0.0
        self._parser: Any = None
        self._on_body: OnBody | None = None
        self._answered: asyncio.Future[None] | None = None
        self._begun = False

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """The answer's status; its body goes to `on_body`. Raises ConnectionLost."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._begun, self.status = on_body, False, 0
        self._answered = asyncio.get_running_loop().create_future()
        self.num_requests += 1
        if not self.is_open:
            raise ConnectionLost("closed", had_begun=False)
        self._transport.write(request)
        try:
            await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            self._on_body = self._answered = None
        if not self._parser.should_keep_alive():
            self.close()
        return self.status

    def close(self) -> None:
        """May be called again."""
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._answered is None:  # nothing was asked for
            self.close()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(str(exc) if exc is not None else "closed by the server")

    def on_status(self, status: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionLost(reason, self._begun))


class Connections:
    """To one server; a connection that is done with its request is used again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ssl = target.ssl_context()
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """As `Connection.ask`. Raises OSError too, if there is no connection to be had.

        An idle connection that the server has closed meanwhile is replaced.
        """
        while True:
            connection = await self._take()
            try:
                status = await connection.ask(request, on_body)
            except ConnectionLost as error:
                if error.had_begun or connection.num_requests == 1:
                    raise
                continue
            if connection.is_open:
                self._idle.append(connection)
            return status

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _take(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._target.host, self._target.port, ssl=self._ssl
        )
        return connection
