"""The outermost ASGI layer: request ids, access control, response counts and the access log."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from compiled_engine.server.admin import ADMIN
from compiled_engine.server.cache_salt import KEY
from compiled_engine.server.errors import ApiError
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.origin import read_origin
from compiled_engine.server.replies import error_response
from compiled_engine.server.serving import Serving
from compiled_engine.server.web_origins import AllowedPages

Headers = Mapping[str, str]


def is_loopback(host: str) -> bool:
    """Return whether `host`, an IP address or a name, can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def visitor_check(options: ServerOptions) -> Callable[[Headers], ApiError | None]:
    """Return a function that takes a request's headers, and refuses requests from web pages of other sites.

    The function returns the error for a refused request, otherwise None. The header `origin`, if present, must be this
    server's own or an allowed one. A server that listens on a loopback address also refuses a malformed `host`, and a
    `host` that is a name with a dot, unless the name is the server's own or that of an allowed origin: in DNS
    rebinding, the name of another site resolves to this machine. Servers at other addresses accept every `host`.
    Nothing is refused if API keys are required or every origin is allowed.
    """
    pages = AllowedPages(options.allowed_origin)
    if options.api_key or pages.has_all:
        return lambda headers: None
    hosts = pages.hosts | {options.host}
    checks_host = is_loopback(options.host)

    def check(headers: Headers) -> ApiError | None:
        host = _split_host(headers["host"]) if "host" in headers else None
        if checks_host and host is not None and not (_is_near(host.hostname or ".") or host.hostname in hosts):
            return _refusal("host", headers["host"])
        origin = headers.get("origin")
        if origin is None:
            return None
        given = origin.lower().partition("://")[2] if read_origin(origin) is not None else None
        is_own = host is not None and given == host.netloc.lower()
        return None if is_own or origin in pages else _refusal("origin", origin)

    return check


def _split_host(header: str) -> SplitResult:
    """Return the parts of a `host` header, such as host name and port. All are empty if the header is malformed."""
    try:
        parts = urlsplit("//" + header)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return urlsplit("")
    return parts


def _is_near(host: str) -> bool:
    """Return whether a host is safe from DNS rebinding: an address, or a name without a dot or below .localhost."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return "." not in host.removesuffix(".localhost")


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} must be this server's own, or that of an --allowed-origin, got {value[:100]!r}; "
        "a server with an API key takes any",
        code=f"{header}_not_allowed",
    )


REQUEST_ID = b"x-request-id"
API_KEY = b"x-api-key"  # the header of Anthropic's clients
OTHER_ROUTE = "other"
OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
LONGEST_LOGGED_PATH = 200
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestScope:
    """The outermost ASGI layer, which refuses, counts and logs requests.

    Each response has the request's id in its header x-request-id, or a new id if the request has none or a malformed
    one. Two kinds of requests are not logged, since anyone could fill the log with them: requests that this layer
    refuses and, if the server has API keys, requests that need no key. This log replaces uvicorn's access log, which
    has every response, with paths of any length.

    `routes` are the server's paths. Responses are counted for each of them; those for all other paths are counted
    together. `open_paths` need no API key.
    """

    def __init__(
        self, app: ASGIApp, serving: Serving, routes: Sequence[str], open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self.serving = serving
        self._app = app
        self._routes = frozenset(routes)
        self._patterns = [compile_path(route)[0] for route in routes if "{" in route]
        self._open_paths = frozenset(open_paths)
        self._refusal_of_visitor = visitor_check(serving.options)
        self._pages = AllowedPages(serving.options.allowed_origin)
        self._log, self._has_log = logging.getLogger("uvicorn.access"), serving.options.logs_requests
        self._keys = _digests(serving.options.api_key)
        self._admin_keys = _digests(serving.options.admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, REQUEST_ID) or b""
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        if root and path.startswith(f"{root}/") and not self._is_whole(path, root):  # the proxy kept the prefix
            scope["path"] = path  # the access log reads this object
            path = path.removeprefix(root)
        route = path if path in self._routes else OTHER_ROUTE  # bounds the number of label values

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.serving.metrics.response(route, message["status"])
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id), *for_page]
                if is_logged:
                    self._log_response(scope, message["status"])
            await send(message)

        for_page = self._pages.headers(_header(scope, b"origin"))
        refusal = self._refusal_of_visitor(_named(scope, b"host", b"origin"))
        preflight = self._pages.preflight(scope) if refusal is None else None
        if preflight is None:
            refusal = refusal or self._refusal_of_key(scope, path)
        app = preflight or (self._app if refusal is None else error_response(refusal, path))
        needs_key = bool(self._keys) and preflight is None and path not in self._open_paths
        is_logged = refusal is None and (needs_key or not self._keys) and self._has_log
        await app(scope, receive, send_with_id)

    def _log_response(self, scope: Any, status: int) -> None:
        """Log a response in uvicorn's format. The path is cut to LONGEST_LOGGED_PATH characters."""
        path = get_path_with_query_string(scope)[:LONGEST_LOGGED_PATH]
        line = '%s - "%s %s HTTP/%s" %d'
        self._log.info(line, get_client_addr(scope), scope["method"], path, scope["http_version"], status)

    def _is_whole(self, path: str, root: str) -> bool:
        """Return whether a path that begins with `root`, the prefix that a proxy adds, is itself a route.

        With the prefix /v1, the path /v1/models is one. A path may fit both a route with parameters, prefix included,
        and a route without the prefix. Then the result is False, since the proxy has probably added the prefix.
        """
        if path in self._routes:
            return True
        return self._with_parameters(path) and not self._is_known(path.removeprefix(root))

    def _is_known(self, path: str) -> bool:
        return path in self._routes or self._with_parameters(path)

    def _with_parameters(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._patterns)

    def _refusal_of_key(self, scope: Scope, path: str) -> ApiError | None:
        """Check the request's API key. Return the error for a missing or wrong key, or None.

        Also store in `scope["state"]` the key's digest, and whether it is an admin key. Nothing is checked or stored
        for open paths, or if the server has no keys. The given key is compared with every valid key in constant time,
        so that timing reveals nothing.
        """
        if not (self._keys or self._admin_keys) or path in self._open_paths:
            return None
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = _header(scope, API_KEY) or b""
        given = hashlib.sha256(key.strip()).digest()
        has_key = bool(key.strip())
        matches = [hmac.compare_digest(given, each) for each in (*self._admin_keys, *self._keys)]
        is_admin = has_key and any(matches[: len(self._admin_keys)])
        scope.setdefault("state", {}).update({KEY: given, ADMIN: is_admin})
        if not self._keys or (has_key and any(matches)):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; give it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _digests(keys: Collection[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _named(scope: Scope, *names: bytes) -> dict[str, str]:
    return {key.decode(): value.decode("latin-1") for key, value in scope["headers"] if key in names}
