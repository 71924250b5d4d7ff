"""Requests that pool: they get vectors instead of tokens.

In the extras: for a new request that it gets a vector for each of its tokens, and how many tokens are before the second
of two texts; for a step's result the vectors by request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.core.hooks import PlanFeature
from compiled_engine.core.request import Request
from compiled_engine.messages import Vectors

NAME, TOKEN_TYPES = "pooling", "token_types"


class PoolingPlan(PlanFeature):
    """The token of a request that pools means nothing, and ends it: its max_tokens is 1."""

    def added(self, request: Request) -> None:
        request.yields_tokens = False
        if request.asked.pooling == "token":
            request.computes_every_token = request.extras[NAME] = True
        if request.asked.second_text is not None:
            request.extras[TOKEN_TYPES] = request.asked.second_text

    def taken(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        found = extras.get(NAME, {}).get(request.request_id)
        return {} if found is None else {"vectors": msgspec.convert(found, Vectors)}
