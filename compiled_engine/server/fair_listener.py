"""A listening socket of several processes: the process with the fewest connections accepts the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger("compiled_engine")

# For so long a process with more connections than another leaves a new one to that other.
PATIENCE_S = 0.003
PAUSE_S = 1.0


class FairListener:
    """Accepts connections one at a time. Without it, the process that wakes first would get most of them.

    has_most: whether another process has fewer connections. Replaces asyncio's server in uvicorn's.
    """

    def __init__(
        self,
        bound: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        has_most: Callable[[], bool],
    ) -> None:
        self._bound = bound
        self._make_protocol = make_protocol
        self._context = context
        self._has_most = has_most
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, backlog: int) -> None:
        self._bound.setblocking(False)
        self._bound.listen(backlog)
        self._loop.add_reader(self._bound, self._on_readable)

    def close(self) -> None:
        """Take no more."""
        if self._waking is not None:
            self._waking.cancel()
        self._loop.remove_reader(self._bound)

    async def wait_closed(self) -> None:
        """Connections are for others to wait for."""

    def _on_readable(self) -> None:
        if self._has_most():
            self._rest(PATIENCE_S, self._take)
        else:
            self._take()

    def _rest(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._bound)

        def wake() -> None:
            self._loop.add_reader(self._bound, self._on_readable)
            then()

        self._waking = self._loop.call_later(seconds, wake)

    def _take(self) -> None:
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process has accepted it
        except OSError as error:
            log.error("no connection can be taken: %s", error)
            self._rest(PAUSE_S, lambda: None)
            return
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has gone again, or does not speak TLS
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._context)
