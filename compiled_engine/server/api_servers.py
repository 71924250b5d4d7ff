"""Run additional API processes, each with its own connection to the engine core.

All API processes accept connections at one socket. The process with the fewest connections accepts the next one. The
process that starts the others serves too, as number 0.
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
    """The state that API processes share: which of them accept connections, and how many each of them has.

    The state is in columns of SharedFigures. All processes must reserve their columns in the same order, so create this
    object before any other that reserves columns.
    """

    def __init__(self, figures: SharedFigures) -> None:
        self._figures = figures
        self._serving = figures.reserve(1)
        self._connections = figures.reserve(1)

    def serve(self) -> None:
        """Mark this process as accepting connections."""
        self._figures.own[self._serving] = 1

    async def begin(self) -> None:
        """Mark this process as accepting connections, and wait until process 0 is marked too.

        Process 0 is ready last. Without the wait, the other processes would get all early clients.
        """
        self.serve()
        while not self.serves(0):
            await asyncio.sleep(_FIRST_S)

    def serves(self, number: int) -> bool:
        return bool(self._figures.of(number, self._serving))

    def count(self, change: int) -> None:
        """Add `change` to this process's number of connections."""
        self._figures.own[self._connections] += change

    def has_most(self) -> bool:
        """Return whether another process that accepts connections has fewer connections than this one."""
        others = zip(self._figures.of_others(self._serving), self._figures.of_others(self._connections), strict=True)
        own = self._figures.own[self._connections]
        return any(serves and connections < own for serves, connections in others)

    def forget(self, number: int) -> None:
        """Reset the state of the API process `number`, which has ended."""
        for column in (self._serving, self._connections):
            self._figures.forget(number, column)


@dataclass(frozen=True)
class Order:
    """The message that tells an API process what to serve."""

    address: str  # of the engine core
    options: ServerOptions
    model_name: str  # see `build_app`


class ApiServers:
    """Starts, replaces and stops the additional API processes.

    A process imports its modules when it starts, and then waits for its Order. It serves until SIGTERM or until the
    engine core ends. If a process dies, the core aborts its requests, and a new process replaces it. If a process dies
    before it serves, the server ends, since a new process would probably die too.
    """

    def __init__(self, options: ServerOptions, bound: socket.socket) -> None:
        self.figures = SharedFigures(options.api_server_count)
        self.place = Place(self.figures)
        self._bound = bound
        self._order = b""
        self._stopping = False
        self._processes = {number: self._start(number) for number in range(1, options.api_server_count)}

    def give(self, order: Order) -> None:
        """Send all processes the Order, which says what to serve. Call it after the engine is ready."""
        self._order = msgspec.json.encode(order)
        for process in self._processes.values():
            _send(process, self._order)

    async def wait_ready(self) -> None:
        """Wait until all processes serve. Raises RuntimeError if one has ended instead."""
        while waiting := [number for number in self._processes if not self.place.serves(number)]:
            for number in waiting:
                if (status := self._processes[number].poll()) is not None:
                    raise RuntimeError(f"API process {number} ended with status {status} before it could serve")
            await asyncio.sleep(_LOOK_S)

    async def keep(self, forget: Callable[[int], None]) -> str:
        """Watch the processes, and replace each one that ends, after a call of `forget` with the process's number.

        Returns only if a process ends before it serves, and then returns the reason.
        """
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
        """Send SIGTERM to the processes. At the first SIGTERM they finish running requests; at the second they end."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGTERM)

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until all processes have ended. After `timeout_s` and _EXIT_S more seconds, kill the remaining ones."""
        self.stop_replacing()
        deadline = time.monotonic() + timeout_s + _EXIT_S
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        self.kill()

    def stop_replacing(self) -> None:
        self._stopping = True

    def kill(self) -> None:
        """Kill the additional API processes. May be called repeatedly."""
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
    """Send the order through stdin, so that API keys do not appear in process lists.

    Errors are ignored: they mean that the process has ended, which its exit status shows.
    """
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(order)
        process.stdin.close()
