"""Bound the number of open connections. Connections without a pending request are closed to make room for new ones."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Hashable

# Open files other than client connections, such as those of the engine, checkpoints and the log.
OTHER_FILES = 256


class Connections:
    """Tracks the open connections of a process, including connections in the TLS handshake, and admits at most `most`.

    If there are `most`, a new connection replaces the connection that has been without a complete request for longest.
    `count` is called with 1 for each connection that begins, and with -1 for each that ends.
    """

    def __init__(self, most: int, count: Callable[[int], None] = lambda change: None) -> None:
        self._most = most
        self._count = count
        self._open: set[Hashable] = set()
        self._waiting: dict[Hashable, Callable[[], object]] = {}  # longest waiting first

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, connection: Hashable, close: Callable[[], object]) -> bool:
        """Add a connection; `close` closes it.

        Returns False, and adds nothing, if there are `most` connections and all have requests.
        """
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            longest, end = next(iter(self._waiting.items()))
            self.end(longest)
            end()
        self._open.add(connection)
        self._waiting[connection] = close
        self._count(1)
        return True

    def wait(self, connection: Hashable, close: Callable[[], object]) -> None:
        """Mark a connection as without a complete request. `close` closes it."""
        if connection in self._open:
            self._waiting[connection] = close

    def work(self, connection: Hashable) -> None:
        """Mark a connection as having a complete request."""
        self._waiting.pop(connection, None)

    def end(self, connection: Hashable) -> None:
        """Remove a closed connection. May be called repeatedly."""
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self._count(-1)


def connections_of_a_process(wanted: int, processes: int) -> int:
    """Return each process's share of the `wanted` connections, within the system's limit on open files of a process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = -(-wanted // processes)
    return share if files == resource.RLIM_INFINITY else min(share, max(files - OTHER_FILES, files // 2))


def allow_many_files() -> None:
    """Raise this process's limit on open files to the system's maximum, since each connection is a file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
