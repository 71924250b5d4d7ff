"""From a request's body to its fields, and from an answer to a response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.server.errors import ApiError
from compiled_engine.server.event_stream import EventStream, unless_gone
from compiled_engine.server.json_body import LONG_BODY, decoded, read_json
from compiled_engine.server.request_fields import HABITS, REFUSED, Refused, read_request
from compiled_engine.server.serving import Serving

Reply: TypeAlias = "Response | EventStream"
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
    """The typed request, and what of it is ignored. Raises ApiError."""
    limits = serving.options.limits
    try:
        async with asyncio.timeout(limits.receive_timeout):
            body = await read_json(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.receive_timeout:g} s") from None

    def read() -> tuple[Fields, list[str]]:
        values = decoded(body, limits.max_json_depth, limits.max_json_values)
        return read_request(values, kind, strict=serving.options.strict, refused=refused, habits=habits)

    async def read_in_turn() -> tuple[Fields, list[str]]:
        async with serving.decoding:
            await asyncio.sleep(0)  # whoever is ready comes between this body and the one before
            return read()

    return read() if len(body) < LONG_BODY else await unless_gone(request.receive, read_in_turn())


def json_response(value: Any, ignored: Sequence[str] = ()) -> Response:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), headers={"content-type": "application/json", **warned(ignored)})


def error_response(error: ApiError) -> Response:
    """The whole response for an error."""
    return Response(error.body(), error.status, {"content-type": "application/json", **error.headers})


def warned(ignored: Sequence[str]) -> dict[str, str]:
    """The header that says what of a request was ignored."""
    text = "; ".join(ignored)[:LONGEST_HEADER]
    printable = "".join(character if character.isascii() and character.isprintable() else "?" for character in text)
    return {WARNING_HEADER: printable} if ignored else {}
