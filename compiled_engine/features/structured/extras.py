"""Defines the data of constrained requests in the extras of messages between the frontend, the engine core and ranks.

An EngineRequest has its grammar, and LateInputs have the masks of a step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.engine.messages import EngineRequest

NAME = "structured"


def extras_of(grammar: str | None) -> dict[str, Any]:
    """Return the entries for EngineRequest.extras of a request with this grammar (llguidance's format); {} for None."""
    return {} if grammar is None else {NAME: grammar}


def grammar_of(request: EngineRequest) -> str | None:
    """Return the grammar of a request, or None if it has none."""
    return request.extras.get(NAME)


class TokenMasks(msgspec.Struct, frozen=True, array_like=True):
    """The masks of allowed next tokens of M requests.

    A constrained request of the step that is not listed has failed; its tokens are not used.
    """

    request_ids: list[str]
    words: memoryview  # M masks of int32 words, one after the other, see sampling/token_mask.py


def masks_in(extra: Any) -> TokenMasks:
    """Return the masks from the entry of this feature in LateInputs."""
    return msgspec.convert(extra, TokenMasks)
