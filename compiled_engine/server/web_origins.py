"""Web pages that may use the server: their origins, and what a browser asks for before it gives a page an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

from compiled_engine.server.options import ANY_ORIGIN
from compiled_engine.server.origin import read_origin

Header = tuple[bytes, bytes]

# Headers of answers that a page may read besides those that every page may.
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-compiled-engine-warning, retry-after")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?: *, *[A-Za-z0-9_-]+)*")
# Seconds for which a browser remembers the answer to a preflight.
_PREFLIGHT_AGE = b"600"


class AllowedPages:
    """Pages of origins such as https://chat.example, to which a browser gives the server's answers (CORS).

    The origin * is every origin, "null" of a page without one included.
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
        """Return what an answer to a request with this origin has: none where no page is allowed."""
        if self.has_all:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        if origin is None or origin.decode("latin-1") not in self:
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), _EXPOSED]

    def preflight(self, scope: Scope) -> Response | None:
        """Return the answer to a browser that asks whether an allowed page may send a request; None if it does not.

        It has no key: browsers add none to this question.
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
