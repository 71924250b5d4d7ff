"""Measure JSON before it is parsed: its values, keys, containers (arrays and objects) and nesting depth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from compiled_engine.server.errors import bad_request

# Most containers in a body, and in the arguments of its tool calls. Each takes a microsecond to create and free.
MOST_CONTAINERS = 1 << 16
# Most keys in all objects of a body, and in those of the arguments of its tool calls. Each takes half a microsecond.
MOST_KEYS = 1 << 18
_BUT_MARKS = bytes(sorted(set(range(256)) - set(b'[]{},:"')))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


class _Counts(NamedTuple):
    commas: int
    colons: int
    opening: int

    def excess(self, max_values: int) -> str:
        """Return a description of the first bound that the counts exceed, or "" if they exceed none."""
        if self.commas >= max_values:
            return f"{max_values} values"
        if self.colons > MOST_KEYS:
            return f"{MOST_KEYS} keys"
        return f"{MOST_CONTAINERS} arrays and objects" if self.opening > MOST_CONTAINERS else ""


def check_size(body: bytes, max_depth: int, max_values: int) -> None:
    """Raise ApiError 400 for JSON that is too deep, or has too many values, keys or containers."""
    most = _count_at_most(body)
    if not most.excess(max_values) and most.opening <= max_depth:
        return
    marks = _outside_strings(body)
    if excess := _count(marks).excess(max_values):
        raise bad_request(None, f"the body must have at most {excess}")
    if _depth(marks) > max_depth:
        raise bad_request(None, f"the body must have at most {max_depth} arrays and objects within each other")


def check_arguments(texts: Iterable[str], max_values: int) -> None:
    """Raise ApiError 400 if the arguments of tool calls together have too many values, keys or containers."""
    bodies = [text.encode(errors="surrogatepass") for text in texts]
    if not _total(map(_count_at_most, bodies)).excess(max_values):
        return
    if excess := _total(_count(_outside_strings(body)) for body in bodies).excess(max_values):
        raise bad_request("messages", f"arguments of messages must have at most {excess}")


def _count_at_most(body: bytes) -> _Counts:
    """Return upper bounds of the numbers of commas, colons and opening brackets: those within strings count too."""
    return _Counts(body.count(b","), body.count(b":"), body.count(b"[") + body.count(b"{"))


def _count(marks: np.ndarray) -> _Counts:
    commas, colons = (int(np.count_nonzero(marks == ord(mark))) for mark in ",:")
    return _Counts(commas, colons, int(np.count_nonzero(_STEPS[marks] > 0)))


def _total(counts: Iterable[_Counts]) -> _Counts:
    return _Counts(*map(sum, zip((0, 0, 0), *counts, strict=True)))


def _depth(marks: np.ndarray) -> int:
    return int(_STEPS[marks].cumsum(dtype=np.int32).max(initial=0))


def _outside_strings(body: bytes) -> np.ndarray:
    """Return the brackets, commas and colons outside strings, and the quotes that end strings: in order, uint8 codes.

    A regular expression would take a microsecond per string on the event loop.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(None, _BUT_MARKS), np.uint8)
    inside = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1  # whether the number of quotes so far is odd
    return marks[inside == 0]
