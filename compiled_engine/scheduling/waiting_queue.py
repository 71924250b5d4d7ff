"""Requests that wait to be admitted, the one to be served next first."""

from __future__ import annotations

import heapq

from compiled_engine.scheduling.request import Request


class WaitingQueue:
    """A heap by `Request.order`; a removed request's key stays behind and is skipped when it surfaces."""

    def __init__(self) -> None:
        self._requests: dict[tuple[int, int], Request] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.order] = request
        heapq.heappush(self._heap, request.order)

    def peek(self) -> Request:
        """The next request. Raises IndexError if there is none."""
        while self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]]

    def pop(self) -> Request:
        """Take the next request out. Raises IndexError if there is none."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.order]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that will not come back."""
        del self._requests[request.order]
