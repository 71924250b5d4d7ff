"""The outputs of one request, for a reader that waits for the next change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, get_args

from compiled_engine.frontend.output_processor import RunningRequest
from compiled_engine.frontend.outputs import RequestOutput

OutputKind = Literal["cumulative", "delta", "final"]
OUTPUT_KINDS: tuple[str, ...] = get_args(OutputKind)


class RequestStream:
    """Steps arrive independently of the reader: a slow reader gets everything since its last output at once."""

    def __init__(self, state: RunningRequest, output: OutputKind) -> None:
        self.state = state
        self._output = output
        self._has_changed = False
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    def wake(self) -> None:
        """The state has changed."""
        if self._output != "final" or self.state.finished:
            self._has_changed = True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader, unless the request has ended."""
        self._failure = error
        self._has_changed = True
        if self._waiting is not None and not self._waiting.done():
            with suppress(RuntimeError):  # the reader's event loop is closed
                self._waiting.set_result(None)

    async def next(self) -> RequestOutput:
        """The next output; the last one has `finished`. For one reader."""
        if not self._has_changed:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._has_changed = False
        if self._failure is not None and not self.state.finished:
            raise self._failure
        return self.state.delta() if self._output == "delta" else self.state.snapshot()
