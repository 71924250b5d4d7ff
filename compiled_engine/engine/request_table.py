"""Keeps the requests that have not ended, running and waiting, and moves requests between the two states."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Sequence

from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.plan_hooks import PlanHooks
from compiled_engine.engine.request import Request, RequestStatus, check_requests


class WaitingQueue:
    """The waiting requests, in the order of `Request.order`.

    If a feature does not let a request start, the request is skipped, so that others need not wait for it.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[int, int], Request] = {}
        self._heap: list[tuple[int, int]] = []  # keys of removed requests stay until `peek` meets them
        self._skipped: list[tuple[int, int]] = []  # requests that were removed meanwhile included

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.order] = request
        heapq.heappush(self._heap, request.order)

    def peek(self) -> Request | None:
        """Return the first request that is not skipped, without removing it; None if there is none."""
        while self._heap and self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]] if self._heap else None

    def pop(self) -> None:
        """Remove the request that `peek` has just returned."""
        del self._requests[heapq.heappop(self._heap)]

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, wherever it is in the queue."""
        del self._requests[request.order]

    def skip(self) -> None:
        """Skip the request that `peek` has just returned, until `restore`."""
        self._skipped.append(heapq.heappop(self._heap))

    def restore(self) -> None:
        """Put all skipped requests back to their places in the order."""
        for order in self._skipped:
            if order in self._requests:
                heapq.heappush(self._heap, order)
        self._skipped.clear()

    @property
    def num_skipped(self) -> int:
        """The number of waiting requests that are skipped."""
        return sum(order in self._requests for order in self._skipped)


class RequestTable:
    """The requests of a scheduler that have not ended, and their changes of state."""

    def __init__(self, kv_cache: KVCacheManager, hooks: PlanHooks) -> None:
        self._kv_cache, self._hooks = kv_cache, hooks
        self.by_id: dict[str, Request] = {}  # only this class changes it
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # sorted by order
        self.removed: list[str] = []  # ids of requests whose rows the runner frees in the next step
        self.num_late = 0  # number of requests that sample late

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        self.waiting.push(request)
        for added in self._hooks.added:
            added(request)
        self.num_late += request.samples_late

    def start(self, request: Request) -> None:
        """Move the first waiting request, which has taken its resources, to the running ones."""
        self.waiting.pop()
        request.start()
        bisect.insort(self.running, request, key=operator.attrgetter("order"))

    def preempt_last(self) -> Request:
        """Preempt the last running request in order, and return it.

        Its resources are freed, and it waits in its old place in the order, to be computed again.
        """
        request = self.running.pop()
        self._release(request, RequestStatus.PREEMPTED)
        self.waiting.push(request)
        return request

    def preempt(self, requests: Sequence[Request]) -> None:
        """Preempt requests as `preempt_last` does. Requests that no longer run are ignored."""
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
                self._release(request, RequestStatus.PREEMPTED)
                self.waiting.push(request)

    def retire(self, requests: Sequence[Request]) -> None:
        """Free the resources of requests whose last token is in flight. Requests that no longer run are ignored."""
        retired = [request for request in requests if request.status is RequestStatus.RUNNING]
        for request in retired:
            self._release(request, RequestStatus.ENDING)
        if retired:
            self.sweep()

    def drop(self, request: Request) -> None:
        """End a request in any state: free its resources, and remove it from the running or waiting ones."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self.end(request)

    def end(self, request: Request) -> None:
        """End a request: free its resources and forget it. `sweep` must remove it from `running` afterwards."""
        if request.status is RequestStatus.RUNNING:
            self._release(request, RequestStatus.FINISHED)
        else:
            if request.status is not RequestStatus.ENDING:
                self.waiting.remove(request)
            request.status = RequestStatus.FINISHED
            request.set_steady_limits()
        self.num_late -= request.samples_late
        del self.by_id[request.request_id]
        for ended in self._hooks.ended:
            ended(request)

    def sweep(self) -> None:
        """Remove the requests that no longer run from `running`."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _release(self, request: Request, status: RequestStatus) -> None:
        """Free a running request's resources at once, and set its status. kv_cache.py explains why this is safe."""
        self._kv_cache.free(request)
        request.status, request.has_sampled = status, False
        request.set_steady_limits()
        self.removed.append(request.request_id)

    def take_removed(self) -> tuple[str, ...]:
        removed, self.removed = self.removed, []
        return tuple(removed)

    def check_integrity(self) -> None:
        """Raise RuntimeError that names the fault unless requests and the resources that they hold are consistent."""
        check_requests(self.by_id.values(), self.running, len(self.waiting))
        self._kv_cache.check_integrity(self.running)
