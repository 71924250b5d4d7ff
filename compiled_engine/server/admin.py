"""Reserve actions to administrators: changing adapters or weights, pausing the engine, and priorities below 0."""

from __future__ import annotations

from starlette.requests import Request

from compiled_engine.server.errors import ApiError
from compiled_engine.server.serving import serving_of

ADMIN = "is_admin"
"""The field of a request's state that holds whether its API key is one of `--admin-api-key`."""


def require_admin(request: Request, param: str, what: str) -> None:
    """Raise ApiError 403 if the server has administrator keys and the request has none of them.

    `param` is the request field at fault, and `what` describes the action.
    """
    if serving_of(request).options.admin_api_key and not request.scope["state"].get(ADMIN):
        raise ApiError(403, f"{what} needs a key of --admin-api-key", param=param, code="admin_key_required")
