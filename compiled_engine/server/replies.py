"""Read and decode request bodies, and send JSON responses and event streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compiled_engine.frontend.input_processor import is_priority
from compiled_engine.process.memory import collection_paused
from compiled_engine.server.admin import require_admin
from compiled_engine.server.errors import UNEXPECTED, ApiError, bad_request
from compiled_engine.server.json_size import check_size
from compiled_engine.server.request_fields import HABITS, REFUSED, Refused, read_request
from compiled_engine.server.serving import Serving

log = logging.getLogger("compiled_engine")

Result = TypeVar("Result")

# Bytes of a long answer that are encoded before other work may run.
PIECE_BYTES = 1 << 18
DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with `value` as JSON. `name` is the event's type."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


async def with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the events, then the event [DONE]. If the events fail, an event with the error precedes it."""
    async with aclosing(events):
        try:
            async for each in events:
                yield each
        except ApiError as error:
            yield event(error.response())
        except Exception:
            log.exception("a stream failed")
            yield event(ApiError(500, UNEXPECTED).response())
    yield DONE


class PieceStream:
    """A response 200 whose body is sent piece by piece. If the client disconnects, the generator `pieces` is closed.

    While the client reads slowly, the generator waits. It may then yield more in one piece.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._pieces = pieces
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        async with aclosing(self._pieces):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await unless_gone(receive, self._send(send))
            except ClientDisconnect:
                return

    async def _send(self, send: Send) -> None:
        async for data in self._pieces:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(PieceStream):
    """A response that is a stream of server-sent events."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, {**HEADERS, **headers})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client disconnects first, cancel the work and raise ClientDisconnect."""
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


# From this size in bytes, bodies are decoded one at a time: several at once would block the event loop for long.
LONG_BODY = 16 << 10


async def read_json(request: Request, max_bytes: int) -> bytes:
    """Return the request's JSON body as bytes, not decoded.

    Raises ApiError 413 for too many bytes, 415 for a content type other than JSON; ClientDisconnect if the client
    disconnects.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be JSON (content type application/json), got {kind[:80]!r}")
    return await _read(request, max_bytes)


def decoded(body: bytes, max_depth: int, max_values: int) -> dict[str, Any]:
    """Return the JSON object in the body.

    Raises ApiError 400 for anything else, and for JSON that is nested deeper than `max_depth` or has more than
    `max_values` values.
    """
    check_size(body, max_depth, max_values)
    return _parsed(body)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        with collection_paused():  # many small arrays would trigger full garbage collections
            value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(None, f"the body must be valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request(None, f"the body must be a JSON object, got {type(value).__name__}")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def read_bytes(request: Request, serving: Serving) -> bytes:
    """Return the request's body, of any content type.

    Raises ApiError 408 if the body arrives too late, 413 if it is too large; ClientDisconnect if the client
    disconnects.
    """
    limits = serving.options.limits
    try:
        async with asyncio.timeout(limits.receive_timeout):
            return await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.receive_timeout:g} s") from None


Reply: TypeAlias = "Response | PieceStream"
Fields = TypeVar("Fields", bound=msgspec.Struct)
WARNING_HEADER = "x-compiled-engine-warning"
LONGEST_HEADER = 1000


async def read_body(
    request: Request,
    serving: Serving,
    kind: type[Fields],
    refused: dict[str, Refused] = REFUSED,
    habits: frozenset[str] = HABITS,
) -> tuple[Fields, list[str]]:
    """Return the request's JSON body as a `kind`, and a warning for each ignored field.

    See `read_request` for `refused` and `habits`. Raises ApiError, and ClientDisconnect if the client disconnects.
    """
    limits = serving.options.limits
    try:
        async with asyncio.timeout(limits.receive_timeout):
            body = await read_json(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.receive_timeout:g} s") from None

    def read() -> tuple[Fields, list[str]]:
        values = _parsed(body)
        fields, ignored = read_request(values, kind, strict=serving.options.strict, refused=refused, habits=habits)
        if serving.chat is not None and not serving.options.strict:
            ignored += serving.chat.drop_unread(fields)
        priority = getattr(fields, "priority", None)
        if priority is not None and not is_priority(priority):
            raise bad_request("priority", f"priority must be an integer of 64 bits, got {priority}")
        if priority is not None and priority < 0:
            require_admin(request, "priority", "a priority below 0")
        if priority and not serving.engine.limits.has_priorities:
            fields.priority = None  # type: ignore[attr-defined]
            ignored.append("priority has no effect unless scheduling_policy is 'priority'")
        return fields, ignored

    async def read_in_turn() -> tuple[Fields, list[str]]:
        async with serving.decoding:
            # The thread lets other work run meanwhile, and between two bodies.
            await asyncio.to_thread(check_size, body, limits.max_json_depth, limits.max_json_values)
            return read()

    if len(body) < LONG_BODY:
        check_size(body, limits.max_json_depth, limits.max_json_values)
        return read()
    return await unless_gone(request.receive, read_in_turn())


def json_response(value: Any, ignored: Sequence[str] = ()) -> Response:
    """Return a response 200 with `value` as JSON. ignored: warnings, which a header of the response lists."""
    return Response(msgspec.json.encode(value), headers={"content-type": "application/json", **warned(ignored)})


def long_json_response(parts: Iterable[bytes], ignored: Sequence[str] = ()) -> PieceStream:
    """Return a response 200 with JSON that is encoded while it is sent.

    parts: the encoded JSON in parts, each quick to make. ignored: warnings, which a header of the response lists.
    """
    return PieceStream(_in_pieces(parts), {"content-type": "application/json", **warned(ignored)})


async def _in_pieces(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
            await asyncio.sleep(0)
    yield bytes(piece)


def error_response(error: ApiError, path: str = "") -> Response:
    """Return the response for an error, in the shape of the path's API."""
    return Response(error.body(path), error.status, {"content-type": "application/json", **error.headers})


def warned(ignored: Sequence[str]) -> dict[str, str]:
    """Return the header WARNING_HEADER with the warnings `ignored`, as a dict; an empty dict without warnings."""
    text = "; ".join(ignored)[:LONGEST_HEADER]
    printable = "".join(character if character.isascii() and character.isprintable() else "?" for character in text)
    return {WARNING_HEADER: printable} if ignored else {}
