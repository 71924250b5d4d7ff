"""How many completions the server takes on at a time; beyond it, it says that it is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compiled_engine.server.errors import ApiError

RETRY_AFTER_S = 1


class Admission:
    """Counts completions that run or wait: each has its state here and in the engine, whether it runs or not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_flight = 0
        self.refused = 0

    @contextmanager
    def admit(self, completions: int) -> Iterator[None]:
        """Around the work for so many completions. Raises ApiError 503 where there are too many already."""
        if self.in_flight + completions > self._most:
            self.refused += 1
            raise ApiError(
                503,
                f"the server is busy: {self.in_flight} completions are under way, and it takes {self._most}",
                code="server_busy",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self.in_flight += completions
        try:
            yield
        finally:
            self.in_flight -= completions
