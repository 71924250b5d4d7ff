"""Around every request: its id, who may enter, and the count of responses."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_engine.server.cache_salt import KEY
from compiled_engine.server.errors import ApiError
from compiled_engine.server.replies import error_response
from compiled_engine.server.serving import Serving
from compiled_engine.server.visitors import visitor_check

REQUEST_ID = b"x-request-id"
OTHER_ROUTE = "other"
OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestScope:
    """The outermost layer. A request's id comes back in the response; one that is no plain word is replaced.

    routes: the paths that responses are counted by. open_paths: those that need no API key.
    """

    def __init__(
        self, app: ASGIApp, serving: Serving, routes: Sequence[str], open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self.serving = serving
        self._app = app
        self._routes = frozenset(routes)
        self._open_paths = frozenset(open_paths)
        self._refusal_of_visitor = visitor_check(serving.options)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in serving.options.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, REQUEST_ID) or b""
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = path if path in self._routes else OTHER_ROUTE  # a label must not grow with what is asked

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.serving.metrics.response(route, message["status"])
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        refusal = self._refusal_of_visitor(_named(scope, b"host", b"origin")) or self._refusal_of_key(scope, path)
        app = self._app if refusal is None else error_response(refusal)
        await app(scope, receive, send_with_id)

    def _refusal_of_key(self, scope: Scope, path: str) -> ApiError | None:
        """Every key is compared, each in constant time: how long it takes tells nothing of them."""
        if not self._keys or path in self._open_paths:
            return None
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        scope.setdefault("state", {})[KEY] = given
        matches = [hmac.compare_digest(given, each) for each in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; give it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _named(scope: Scope, *names: bytes) -> dict[str, str]:
    return {key.decode(): value.decode("latin-1") for key, value in scope["headers"] if key in names}
