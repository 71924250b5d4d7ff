"""Decides which requests may overtake a request that waits for a slot for its adapter.

The scheduler skips a request if its adapter finds no slot, so that other requests need not wait for it. A request with
an adapter may overtake a skipped request only if it arrived before the skip. These are finitely many requests, so a
slot becomes free eventually.
"""

from __future__ import annotations

from compiled_engine.engine.request import Request


class Overtaking:
    """Tracks the waiting requests that were skipped, by Request.order."""

    def __init__(self) -> None:
        self._newest = 0  # newest arrival number
        # For each request that was skipped, the last arrival number that may overtake it.
        self._last: dict[tuple[int, int], int] = {}
        self._first_skipped: tuple[int, int] | None = None
        self._is_over = False  # the first request that was skipped no longer waits

    def added(self, request: Request) -> None:
        self._newest = max(self._newest, request.order[1])

    def may_overtake(self, request: Request) -> bool:
        """Return whether a request with an adapter may run before the skipped requests; True if there are none."""
        first = self._first_skipped
        return first is None or request.order < first or request.order[1] <= self._last[first]

    def skip(self, request: Request) -> None:
        self._last.setdefault(request.order, self._newest)
        if self._first_skipped is None or request.order < self._first_skipped:
            self._first_skipped = request.order

    def restored(self) -> None:
        """Record that the scheduler has put the skipped requests back into their places in the queue."""
        self._first_skipped, self._is_over = None, False

    @property
    def is_over(self) -> bool:
        """Whether the first skipped request, which others must not overtake, no longer waits."""
        return self._is_over

    def forget(self, request: Request) -> None:
        """Forget a request that no longer waits."""
        self._last.pop(request.order, None)
        self._is_over |= request.order == self._first_skipped
