"""Origins of web pages that may use the server, and the CORS headers and preflights for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

from compiled_engine.server.options import ANY_ORIGIN
from compiled_engine.server.origin import read_origin

Header = tuple[bytes, bytes]

# Response headers that a page may read beyond the safelisted ones.
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-compiled-engine-warning, retry-after")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?: *, *[A-Za-z0-9_-]+)*")
# Seconds for which a browser remembers the answer to a preflight.
_PREFLIGHT_AGE = b"600"


class AllowedPages:
    """Web page origins, such as https://chat.example, that may read the server's answers (CORS).

    The origin * allows every origin, including "null".
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self.has_all = ANY_ORIGIN in origins
        self._origins = {origin for text in origins if (origin := read_origin(text)) is not None}

    @property
    def hosts(self) -> set[str]:
        return {origin.host for origin in self._origins}

    def __contains__(self, origin: str) -> bool:
        if self.has_all:
            return bool(origin)
        return read_origin(origin) in self._origins

    def headers(self, origin: bytes | None) -> list[Header]:
        """Return the CORS headers of a response to a request from `origin`; none if the server allows no origins."""
        if self.has_all:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        if origin is None or origin.decode("latin-1") not in self:
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), _EXPOSED]

    def preflight(self, scope: Scope) -> Response | None:
        """Return the answer if the request is a CORS preflight of an allowed page, otherwise None.

        Preflights need no API key, since browsers never send one with them.
        """
        given = dict(scope["headers"])
        origin = given.get(b"origin", b"").decode("latin-1")
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in given or origin not in self:
            return None
        answer = Response(status_code=204)
        answer.raw_headers += [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-max-age", _PREFLIGHT_AGE),
        ]
        names = given.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES.fullmatch(names):
            answer.raw_headers.append((b"access-control-allow-headers", names))
        return answer
