"""Detect an engine core that is alive but no longer responds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

# The shortest interval between questions to the core, however often health is requested.
PAUSE_S = 1.0


class Pulse:
    """Measures for how long the engine core has not responded.

    `ask` sends the core a question and returns after its answer. There is at most one unanswered question.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def silent_s(self) -> float:
        """Return for how many seconds a question has been unanswered; 0 if every question is answered.

        If every question is answered, ask a new one, unless the previous one was asked less than PAUSE_S ago.
        """
        now = asyncio.get_running_loop().time()
        if self._asking is not None and not self._asking.done():
            return now - self._asked_at
        if self._asking is None or now - self._asked_at >= PAUSE_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._question())
        return 0.0

    async def _question(self) -> None:
        with suppress(Exception):  # a failure is an answer; the core's death is detected elsewhere
            await self._ask()
