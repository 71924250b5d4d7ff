"""A request's body: read within its bounds, and decoded as a JSON object."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from compiled_engine.process.memory import collection_paused
from compiled_engine.server.errors import ApiError, bad_request

# Bytes from which bodies are decoded one after the other. A few milliseconds each: together they would hold up others.
LONG_BODY = 16 << 10
# Arrays and objects of a body: each takes a microsecond to make and to free, on the event loop.
MOST_CONTAINERS = 1 << 16
_BUT_MARKS = bytes(sorted(set(range(256)) - set(b'[]{},"')))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The body. Raises ApiError 413 for too many bytes, 415 for another type than JSON; ClientDisconnect if the client
    goes while it sends."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be JSON (content type application/json), got {kind[:80]!r}")
    return await _read(request, max_bytes)


def decoded(body: bytes, max_depth: int, max_values: int) -> dict[str, Any]:
    """The object that the body holds. Raises ApiError 400 for what is no JSON object, too deep, or has too many values,
    arrays or objects."""
    if body.count(b",") >= max_values and np.count_nonzero(_outside_strings(body) == ord(",")) >= max_values:
        raise bad_request(None, f"the body must have at most {max_values} values")
    if (
        _count_opening(body) > MOST_CONTAINERS
        and np.count_nonzero(_STEPS[_outside_strings(body)] > 0) > MOST_CONTAINERS
    ):
        raise bad_request(None, f"the body must have at most {MOST_CONTAINERS} arrays and objects")
    if is_deeper_than(body, max_depth):
        raise bad_request(None, f"the body must have at most {max_depth} arrays and objects within each other")
    try:
        with collection_paused():  # else many small arrays have every object of the process looked through
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


def is_deeper_than(body: bytes, depth: int) -> bool:
    """Whether JSON has more arrays and objects within each other; found without recursion, and before it is parsed.

    Of a text that is no JSON, what a parser may read of it counts: all before its first error.
    """
    if _count_opening(body) <= depth:
        return False
    return bool(_STEPS[_outside_strings(body)].cumsum(dtype=np.int32).max(initial=0) > depth)


def _count_opening(body: bytes) -> int:
    """Opening brackets, also those within strings."""
    return body.count(b"[") + body.count(b"{")


def _outside_strings(body: bytes) -> np.ndarray:
    """The brackets and commas that stand in no string, in their order, and the quotes that end one.

    A regular expression would take a microsecond a string, on the event loop.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(None, _BUT_MARKS), np.uint8)
    inside = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1  # whether the number of quotes so far is odd
    return marks[inside == 0]
