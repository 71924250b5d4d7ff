"""The extras of constrained requests in messages, which both sides of the engine core read.

An EngineRequest has its grammar, and LateInputs have the masks of a step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.engine.messages import EngineRequest

NAME = "structured"


def extras_of(grammar: str | None) -> dict[str, Any]:
    """Return the extras of a request with this grammar, in llguidance's form; {} for None."""
    return {} if grammar is None else {NAME: grammar}


def grammar_of(request: EngineRequest) -> str | None:
    """Return the grammar of a request, if it has one."""
    return request.extras.get(NAME)


class TokenMasks(msgspec.Struct, frozen=True, array_like=True):
    """The allowed next tokens of M requests.

    A request that samples late for a constraint but is not listed has failed; its tokens are not used.
    """

    request_ids: list[str]
    words: memoryview  # M masks of int32 words, one after the other, see sampling/token_mask.py


def masks_in(extra: Any) -> TokenMasks:
    """Return the masks in the feature's extra of LateInputs."""
    return msgspec.convert(extra, TokenMasks)
