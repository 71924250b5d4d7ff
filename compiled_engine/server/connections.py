"""The bound on open connections: who waits for no answer makes room for who comes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Hashable

# Open files that are no connections of clients: those of the engine, of checkpoints, and of the log.
OTHER_FILES = 256


class Connections:
    """Counts the connections of a process, among them those whose encryption is still being agreed upon.

    most: so many at a time. A new one beyond that replaces the one that has been without a whole request for longest.
    count: called with 1 for each that begins, and -1 for each that ends.
    """

    def __init__(self, most: int, count: Callable[[int], None] = lambda change: None) -> None:
        self._most = most
        self._count = count
        self._open: set[Hashable] = set()
        self._waiting: dict[Hashable, Callable[[], object]] = {}  # the longest first

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, connection: Hashable, close: Callable[[], object]) -> bool:
        """Add a connection; return False if there are too many, and all have requests. close: ends it."""
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
        """It has no whole request, as in the beginning."""
        if connection in self._open:
            self._waiting[connection] = close

    def work(self, connection: Hashable) -> None:
        """A request has arrived."""
        self._waiting.pop(connection, None)

    def end(self, connection: Hashable) -> None:
        """It is closed. May be called again."""
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self._count(-1)


def connections_of_a_process(wanted: int, processes: int) -> int:
    """Return a process's share of the wanted connections, or as many as the system lets it have."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = -(-wanted // processes)
    return share if files == resource.RLIM_INFINITY else min(share, max(files - OTHER_FILES, files // 2))


def allow_many_files() -> None:
    """Have as many open files as the system lets this process have: each connection is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
