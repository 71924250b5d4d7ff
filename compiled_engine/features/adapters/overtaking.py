"""Which requests may overtake those that wait for the slot of their adapter.

The scheduler sets a request aside whose adapter finds no slot, so that others need not wait for it. Requests with an
adapter overtake it only if they had come when it was set aside first: there are finitely many, so each slot gets free
in time.
"""

from __future__ import annotations

from compiled_engine.engine.request import Request


class Overtaking:
    """Knows the waiting requests that were set aside, by their order."""

    def __init__(self) -> None:
        self._newest = 0  # arrival number
        self._last: dict[tuple[int, int], int] = {}  # of those set aside once, the last arrival that may overtake
        self._first_aside: tuple[int, int] | None = None
        self._is_over = False  # the first that was set aside has ended

    def added(self, request: Request) -> None:
        self._newest = max(self._newest, request.order[1])

    def may_overtake(self, request: Request) -> bool:
        """Return whether a request with an adapter may run before the requests that are set aside."""
        first = self._first_aside
        return first is None or request.order < first or request.order[1] <= self._last[first]

    def set_aside(self, request: Request) -> None:
        self._last.setdefault(request.order, self._newest)
        if self._first_aside is None or request.order < self._first_aside:
            self._first_aside = request.order

    def restored(self) -> None:
        """Note that all requests that were set aside are back in their places."""
        self._first_aside, self._is_over = None, False

    @property
    def is_over(self) -> bool:
        """Return whether the request that the others wait behind has ended."""
        return self._is_over

    def forget(self, request: Request) -> None:
        """Forget a request that waits no more."""
        self._last.pop(request.order, None)
        self._is_over |= request.order == self._first_aside
