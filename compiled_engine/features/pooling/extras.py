"""Requests that pool, in the extras of messages: plain data, which both sides of the engine core read.

Of an EngineRequest and its NewRequest: under NAME that it gets a vector for each of its tokens instead of one, under
TOKEN_TYPES how many tokens are before the second of two texts. Of a step's result and an EngineOutput: its Vectors.
"""

from __future__ import annotations

from typing import Any

import msgspec

NAME, TOKEN_TYPES = "pooling", "token_types"


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """Results of a request that pools: rows of `width` little-endian fp32 values each. first: of a result for each
    token, the position of the first one; what was delivered from there on before is replaced."""

    first: int
    width: int
    data: bytes

    @property
    def num_rows(self) -> int:
        return len(self.data) // (4 * self.width)


def extras_of(*, by_token: bool, second_text: int | None = None) -> dict[str, Any]:
    """Return the extras of a request. second_text: how many tokens are before the second text; None for one text."""
    extras: dict[str, Any] = {NAME: True} if by_token else {}
    if second_text is not None:
        extras[TOKEN_TYPES] = second_text
    return extras


def vectors_in(extras: dict[str, Any]) -> Vectors | None:
    """Return the vectors from the extras of an output, if it has any."""
    found = extras.get(NAME)
    return None if found is None else msgspec.convert(found, Vectors)
