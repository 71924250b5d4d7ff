"""Server-sent events, and answers that nobody waits for any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from compiled_engine.server.errors import UNEXPECTED, ApiError

log = logging.getLogger("compiled_engine")

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(value: Any, name: str | None = None) -> bytes:
    """One event whose data is `value` as JSON."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


async def with_errors(events: AsyncGenerator[bytes, None], last: bytes = DONE) -> AsyncGenerator[bytes, None]:
    """The events and `last`. Where they fail, an event with the error comes instead of what is missing."""
    async with aclosing(events):
        try:
            async for each in events:
                yield each
        except ApiError as error:
            yield event(error.response())
        except Exception:
            log.exception("a stream failed")
            yield event(ApiError(500, UNEXPECTED).response())
    yield last


class EventStream:
    """A response whose body is sent piece by piece, until it ends or the client goes; then the generator is closed.

    A client that reads slowly holds up the generator, which therefore has more to give the next time.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._events = events
        self.headers = {**HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await unless_gone(receive, self._send(send))
            except ClientDisconnect:
                return

    async def _send(self, send: Send) -> None:
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns. Raises ClientDisconnect, with the work cancelled, if the client goes before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
