"""Checking the grammars that requests ask for, which may take long: a few at a time, and no more than wait in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from compiled_engine.server.errors import ApiError, bad_request

Result = TypeVar("Result")

THREADS = 2
MOST_WAITING = 64
RETRY_AFTER_S = 1


class FormChecks:
    """Threads of their own, so that no check holds up whoever tokenises a long prompt.

    timeout: seconds for which a check may wait and run. A check whose client goes before it has begun is never begun.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="forms")
        self._under_way = 0

    async def run(self, check: Callable[[], Result], field: str) -> Result:
        """What the check returns or raises. field: what asked for it. Raises ApiError: 503 if too many wait, 400 if it
        takes too long."""
        if self._under_way >= THREADS + MOST_WAITING:
            raise ApiError(
                503,
                f"the server is busy: {self._under_way} requests wait for a check of {field}",
                code="server_busy",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self._under_way += 1
        running = self._threads.submit(check)
        running.add_done_callback(lambda _: self._ended())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), self._timeout)
        except TimeoutError:
            raise bad_request(field, f"{field} takes too long to check: more than {self._timeout:g} s") from None

    def _ended(self) -> None:
        self._under_way -= 1
