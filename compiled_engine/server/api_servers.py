"""Further processes that answer requests at the server's socket, each with its own connection to the engine core.

The process that starts them serves as well, and is number 0. The process with the fewest connections accepts the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from compiled_engine.process.child import start_process
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.shared_figures import SharedFigures

log = logging.getLogger("compiled_engine")

_MAIN = "compiled_engine.server.api_server_main"
_LOOK_S = 0.1
_FIRST_S = 0.002
_EXIT_S = 5.0


class Place:
    """The shared state of a server's processes, in columns of their figures: which serve, and how many connections each
    has. Create it before any other user of columns."""

    def __init__(self, figures: SharedFigures) -> None:
        self._figures = figures
        self._serving = figures.reserve(1)
        self._connections = figures.reserve(1)

    def serve(self) -> None:
        """Mark this process as one that accepts connections."""
        self._figures.own[self._serving] = 1

    async def begin(self) -> None:
        """Serve, but not before the first process, which comes last at the server's start. Clients that come at once
        would all be with the others."""
        self.serve()
        while not self.serves(0):
            await asyncio.sleep(_FIRST_S)

    def serves(self, number: int) -> bool:
        return bool(self._figures.of(number, self._serving))

    def count(self, change: int) -> None:
        """Count connections of this process that begin, or end."""
        self._figures.own[self._connections] += change

    def has_most(self) -> bool:
        """Return whether another serving process has fewer connections than this one."""
        others = zip(self._figures.of_others(self._serving), self._figures.of_others(self._connections), strict=True)
        own = self._figures.own[self._connections]
        return any(serves and connections < own for serves, connections in others)

    def forget(self, number: int) -> None:
        """A process has ended."""
        for column in (self._serving, self._connections):
            self._figures.forget(number, column)


@dataclass(frozen=True)
class Order:
    """The engine and options for a process to serve. address: of the engine core. model_name: see `build_app`."""

    address: str
    options: ServerOptions
    model_name: str


class ApiServers:
    """The further processes: they start their imports at once, wait for their order, and serve until SIGTERM or the
    core's end.

    figures: with a row for each process. place: that of this process, number 0.

    The death of a process loses its own requests, which the core aborts; a new process replaces it. A process that dies
    before it serves would do so again, so this ends the server.
    """

    def __init__(self, options: ServerOptions, bound: socket.socket) -> None:
        self.figures = SharedFigures(options.api_server_count)
        self.place = Place(self.figures)
        self._bound = bound
        self._order = b""
        self._stopping = False
        self._processes = {number: self._start(number) for number in range(1, options.api_server_count)}

    def give(self, order: Order) -> None:
        """The engine is ready: have them serve."""
        self._order = msgspec.json.encode(order)
        for process in self._processes.values():
            _send(process, self._order)

    async def wait_ready(self) -> None:
        """Wait until all serve. Raises RuntimeError if one has ended instead."""
        while waiting := [number for number in self._processes if not self.place.serves(number)]:
            for number in waiting:
                if (status := self._processes[number].poll()) is not None:
                    raise RuntimeError(f"API process {number} ended with status {status} before it could serve")
            await asyncio.sleep(_LOOK_S)

    async def keep(self, forget: Callable[[int], None]) -> str:
        """Replace processes that end, until one has to be given up; return the reason. forget: called with the number
        of each."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, process in self._processes.items():
                if self._stopping or (status := process.poll()) is None:
                    continue
                if not self.place.serves(number):
                    return f"API process {number} ended with status {status} before it could serve"
                log.error("API process %d has ended with status %d; another takes its place", number, status)
                self.place.forget(number)
                forget(number)
                self._processes[number] = self._start(number)
                _send(self._processes[number], self._order)

    def stop(self) -> None:
        """Signal the processes: the first time they finish running requests, the second time they end at once."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGTERM)

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until all have ended; after `timeout_s` kill them."""
        self.stop_replacing()
        deadline = time.monotonic() + timeout_s + _EXIT_S
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        self.kill()

    def stop_replacing(self) -> None:
        self._stopping = True

    def kill(self) -> None:
        """May be called again."""
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        descriptors = (self._bound.fileno(), self.figures.descriptor)
        return start_process(_MAIN, [*map(str, (*descriptors, number))], descriptors, has_input=True)


def _send(process: subprocess.Popen[bytes], order: bytes) -> None:
    """Send through stdin, so that no key shows in a list of processes. If the process has ended, its status shows
    it."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(order)
        process.stdin.close()
