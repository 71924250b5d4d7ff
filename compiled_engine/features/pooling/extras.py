"""Defines the data of pooling requests in the `extras` of messages between the frontend, the engine core and ranks.

In the extras of an EngineRequest and its NewRequest, NAME is set if the request gets a vector for each token instead of
a single one. TOKEN_TYPES is the number of tokens before the second of two texts. In the extras of an EngineOutput, NAME
has the request's Vectors. In a step's result, they are by request id.
"""

from __future__ import annotations

from typing import Any

import msgspec

NAME, TOKEN_TYPES = "pooling", "token_types"


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """Vectors of a pooling request, as rows of little-endian fp32 values."""

    # Position of the first row's token if each token has a vector, otherwise 0. These rows replace all rows that were
    # delivered earlier for this and later positions.
    first: int
    width: int  # values per row
    data: bytes

    @property
    def num_rows(self) -> int:
        return len(self.data) // (4 * self.width)


def extras_of(*, by_token: bool, second_text: int | None = None) -> dict[str, Any]:
    """Return the entries for EngineRequest.extras of a pooling request.

    by_token: whether it gets a vector for each token. second_text: the number of tokens before the second text; None if
    there is only one text.
    """
    extras: dict[str, Any] = {NAME: True} if by_token else {}
    if second_text is not None:
        extras[TOKEN_TYPES] = second_text
    return extras


def vectors_in(extras: dict[str, Any]) -> Vectors | None:
    """Return the vectors in the extras of an EngineOutput; None if there are none."""
    found = extras.get(NAME)
    return None if found is None else msgspec.convert(found, Vectors)
