"""Whether the engine core answers: a process may be alive, and stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

# The core is asked no more often, however many ask for the health of the server.
PAUSE_S = 1.0


class Pulse:
    """Asks the core something whenever it is looked at, one question at a time.

    ask: returns when the core has answered.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def silent_s(self) -> float:
        """Return for how many seconds a question has been open; 0 if none is."""
        now = asyncio.get_running_loop().time()
        if self._asking is not None and not self._asking.done():
            return now - self._asked_at
        if self._asking is None or now - self._asked_at >= PAUSE_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._question())
        return 0.0

    async def _question(self) -> None:
        with suppress(Exception):  # a failure is an answer, and the end of the core is found elsewhere
            await self._ask()
