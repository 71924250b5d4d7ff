"""Plans pooling requests, which get vectors instead of tokens."""

from __future__ import annotations

from typing import Any

from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.features.pooling.extras import NAME, TOKEN_TYPES


class PoolingPlan(PlanFeature):
    """Plans pooling requests. Their max_tokens is 1, so a request ends with its first token, which has no meaning."""

    def added(self, request: Request) -> None:
        request.returns_tokens = False
        asked = request.asked.extras
        if NAME in asked:
            request.computes_every_token = request.extras[NAME] = True
        if TOKEN_TYPES in asked:
            request.extras[TOKEN_TYPES] = asked[TOKEN_TYPES]

    def output_extras(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        found = extras.get(NAME, {}).get(request.request_id)
        return {} if found is None else {NAME: found}
