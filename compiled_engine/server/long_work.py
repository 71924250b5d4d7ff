"""Run work that would block the event loop on threads, smallest first, with bounds on queue and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from compiled_engine.process.smallest_first import SmallestFirst, TakesLong
from compiled_engine.server.errors import ApiError, bad_request

Result = TypeVar("Result")

# Bytes of a grammar up to which its check does not wait for larger ones.
QUICK_FORM = 16 << 10
# Bounds on queued and running work, large and small.
MOST_LARGE, MOST_SMALL = 64, 1024
RETRY_AFTER_S = 1


class LongWork:
    """Runs one kind of work on threads that no other kind uses, so that different kinds do not delay each other.

    `name` names the threads. `small` is the largest size that counts as small. `timeout` bounds waiting and running
    together, in seconds. Work whose client disconnects before the work begins is dropped.
    """

    def __init__(self, name: str, small: int, timeout: float) -> None:
        self._small = small
        self._timeout = timeout
        self._threads = SmallestFirst(small, name)
        self._under_way: dict[bool, set[Future[Any]]] = {True: set(), False: set()}  # by whether it is small

    async def run(self, field: str, size: int, work: Callable[[], Result]) -> Result:
        """Run work on a thread and return its result. Work that raises TakesLong is repeated as large work.

        `field` is the request field for errors. Raises the work's error, or ApiError: 503 if too much work is queued,
        400 if it takes too long.
        """
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await self._run(field, size, work)
                except TakesLong:
                    return await self._run(field, self._small + 1, work)
        except TimeoutError:
            raise bad_request(field, f"{field} took more than {self._timeout:g} s to process") from None

    async def _run(self, field: str, size: int, work: Callable[[], Result]) -> Result:
        is_small = size <= self._small
        under_way = self._under_way[is_small]
        if (count := len(under_way)) >= (MOST_SMALL if is_small else MOST_LARGE):
            raise ApiError(
                503,
                f"the server is busy: {field} would wait for {count} other requests",
                code="server_busy",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        running = self._threads.submit(size, work)
        under_way.add(running)
        running.add_done_callback(under_way.discard)
        return await asyncio.wrap_future(running)
