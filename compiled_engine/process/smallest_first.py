"""Runs tasks in two threads, the smallest first. One thread takes only small tasks, which never wait for large ones."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


Stopped = Callable[[], bool]
"""Polled by work that can be stopped; returns whether it is."""


def never() -> bool:
    """Return False: a `Stopped` function for work that is never stopped."""
    return False


class WorkStopped(RuntimeError):
    """Raised by work that was stopped because its result is no longer needed."""


class TakesLong(Exception):
    """Raised by work that was submitted as small but is large; the caller submits it again with a large size."""


@dataclass(order=True)
class _Waiting(Generic[Result]):
    size: int
    number: int
    work: Callable[[], Result] = field(compare=False)
    done: Future[Result] = field(compare=False)

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except BaseException as error:
            self.done.set_exception(error)


class SmallestFirst:
    """Runs work in two threads, in the order of size: one thread takes any work, the other only small work.

    The threads start when work is first submitted for them. small: the largest size that counts as small, in the unit
    of the sizes passed to `submit`. name: prefix of the threads' names.
    """

    def __init__(self, small: int, name: str) -> None:
        self._small = small
        self._any = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._quick = ThreadPoolExecutor(1, thread_name_prefix=f"{name} small")
        self._waiting: list[_Waiting[Any]] = []  # a heap
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def submit(self, size: int, work: Callable[[], Result]) -> Future[Result]:
        """Queue work of this size, and return a future for its result or exception.

        If the future is cancelled before the work starts, the work never runs.
        """
        done: Future[Result] = Future()
        waiting = _Waiting(size, next(self._numbers), work, done)
        with self._lock:
            heapq.heappush(self._waiting, waiting)
        done.add_done_callback(lambda _: self._forget(waiting))
        self._any.submit(self._run_one, math.inf)
        if size <= self._small:
            self._quick.submit(self._run_one, self._small)
        return done

    def shutdown(self) -> None:
        """Cancel all waiting work. Running work continues, and this method does not wait for it."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.done.cancel()
        for threads in (self._any, self._quick):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run_one(self, most: float) -> None:
        with self._lock:
            if not self._waiting or self._waiting[0].size > most:
                return  # the other thread has taken it, or it was cancelled
            first = heapq.heappop(self._waiting)
        first.run()

    def _forget(self, gone: _Waiting[Any]) -> None:
        if gone.done.cancelled():
            with self._lock:
                if gone in self._waiting:
                    self._waiting.remove(gone)
                    heapq.heapify(self._waiting)
