"""Where an engine core runs, as the one who started it or has joined it sees it."""

from __future__ import annotations

import socket
from typing import Protocol


class RunningCore(Protocol):
    """Where the core runs: a thread, a process, or a process that somebody else has started.

    socket: the caller's end of the connection to it.
    """

    socket: socket.socket

    @property
    def address(self) -> str | None:
        """Where further callers connect; None if they cannot."""
        ...

    def how_it_ended(self, timeout_s: float) -> str:
        """Wait for its end; say how it came, as far as it can be told from outside."""
        ...

    def close(self, timeout_s: float) -> None:
        """Close the socket, and wait until it has ended. May be called again."""
        ...
