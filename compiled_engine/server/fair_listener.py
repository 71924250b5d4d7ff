"""Accept connections at a socket that processes may share: the process with the fewest connections accepts the next."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from compiled_engine.server.connections import Connections

log = logging.getLogger("compiled_engine")

# How long a process waits before it accepts a new connection, if another process has fewer connections.
PATIENCE_S = 0.003
PAUSE_S = 1.0
# Connections accepted per loop iteration, and seconds for each TLS handshake.
AT_ONCE = 64
HANDSHAKE_S = 10.0


class FairListener:
    """Accepts connections in place of asyncio's server in uvicorn.

    `connections` bounds the connections of this process. `has_most` returns whether another process has fewer
    connections. If so, this process leaves the next connection to that process for PATIENCE_S seconds. Without this
    wait, the process that wakes first would get most connections.
    """

    def __init__(
        self,
        bound: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        connections: Connections,
        has_most: Callable[[], bool] = lambda: False,
    ) -> None:
        self._bound = bound
        self._make_protocol = make_protocol
        self._context = context
        self._connections = connections
        self._has_most = has_most
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, backlog: int) -> None:
        self._bound.setblocking(False)
        self._bound.listen(backlog)
        self._loop.add_reader(self._bound, self._on_readable)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._waking is not None:
            self._waking.cancel()
        self._loop.remove_reader(self._bound)

    async def wait_closed(self) -> None:
        """Do nothing: uvicorn waits for open connections itself."""

    def _on_readable(self) -> None:
        for _ in range(AT_ONCE):
            if self._has_most():
                self._rest(PATIENCE_S, self._take)
                return
            if not self._take():
                return

    def _rest(self, seconds: float, then: Callable[[], object]) -> None:
        self._loop.remove_reader(self._bound)

        def wake() -> None:
            self._loop.add_reader(self._bound, self._on_readable)
            then()

        self._waking = self._loop.call_later(seconds, wake)

    def _take(self) -> bool:
        """Accept a connection. Return False if that failed or another process was faster."""
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process has accepted it
        except OSError as error:
            log.error("no connection can be taken: %s", error)
            self._rest(PAUSE_S, lambda: None)
            return False
        protocol = self._make_protocol()
        if not self._connections.begin(protocol, connection.close):
            connection.close()
            return True
        task = self._loop.create_task(self._connect(connection, protocol))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        connecting = asyncio.current_task()
        if connection.fileno() == -1 or connecting is None:
            return  # it was closed to make room for another
        self._connections.wait(protocol, connecting.cancel)
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HANDSHAKE_S,
            )
        except OSError:
            self._connections.end(protocol)  # it was closed, or its TLS handshake failed
