"""How many completions the server takes on at a time; beyond it, it says that it is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compiled_engine.server.errors import ApiError
from compiled_engine.server.shared_figures import SharedFigures

RETRY_AFTER_S = 1


class Admission:
    """Counts completions that run or wait: each has its state here and in the engine, whether it runs or not.

    The bound is the whole server's, over all its processes. Each counts its own before it looks at the sum, so that
    together they never take on more.
    """

    def __init__(self, most: int, figures: SharedFigures) -> None:
        self._most = most
        self._figures = figures
        self._taken = figures.reserve(1)
        self._refused = figures.reserve(1)

    @property
    def in_flight(self) -> int:
        """Of all processes."""
        return int(self._figures.total(self._taken))

    @property
    def refused(self) -> int:
        """Requests, of all processes."""
        return int(self._figures.total(self._refused))

    @contextmanager
    def admit(self, completions: int) -> Iterator[None]:
        """Around the work for so many completions. Raises ApiError 503 where there are too many already."""
        own = self._figures.own
        own[self._taken] += completions
        try:
            if (under_way := self.in_flight) > self._most:
                own[self._refused] += 1
                raise ApiError(
                    503,
                    f"the server is busy: {under_way - completions} completions are under way, "
                    f"and it takes {self._most}",
                    code="server_busy",
                    headers={"retry-after": str(RETRY_AFTER_S)},
                )
            yield
        finally:
            own[self._taken] -= completions

    def forget(self, process: int) -> None:
        """A process has ended, and with it what it had taken on."""
        self._figures.forget(process, self._taken)
