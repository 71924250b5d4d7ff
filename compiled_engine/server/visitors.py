"""Which web pages may use a server that asks for no key: a browser sends requests for any page that its user opens."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlsplit

from compiled_engine.server.errors import ApiError
from compiled_engine.server.options import ServerOptions

Headers = Mapping[str, str]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def visitor_check(options: ServerOptions) -> Callable[[Headers], ApiError | None]:
    """What refuses a request by its headers `host` and `origin`; nothing where there are keys, which no page has.

    Pages of other sites are told by their origin. A site that lets its own name point to this machine (DNS rebinding)
    is told by the host: a name with a dot, as a site's is, and not an address or the name of a machine nearby. Only a
    server at a loopback address can know that such a name is not its own.
    """
    if options.api_key:
        return lambda headers: None
    pages = {_normal(urlsplit(origin)) for origin in options.allowed_origin}
    hosts = {host for _, host, _ in pages} | {options.host}
    checks_host = is_loopback(options.host)

    def check(headers: Headers) -> ApiError | None:
        host = _split("//" + headers["host"]) if "host" in headers else None
        if checks_host and host is not None and not (_is_near(host.hostname or ".") or host.hostname in hosts):
            return _refusal("host", headers["host"])
        origin = headers.get("origin")
        if origin is None:
            return None
        page = _split(origin)
        own = host is not None and bool(host.hostname) and page.netloc.lower() == host.netloc.lower()
        return None if own or _normal(page) in pages else _refusal("origin", origin)

    return check


def _is_near(host: str) -> bool:
    """Whether no site elsewhere can have this host."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return "." not in host.removesuffix(".localhost")


def _split(url: str) -> SplitResult:
    """The parts of a URL; of what is none, empty ones."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a wrong one
    except ValueError:
        return urlsplit("")
    return parts


def _normal(origin: SplitResult) -> tuple[str, str, int | None]:
    port = origin.port or {"http": 80, "https": 443}.get(origin.scheme)
    return origin.scheme, origin.hostname or "", port


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} must be this server's own, or that of an --allowed-origin, got {value[:100]!r}; "
        "a server with an API key takes any",
        code=f"{header}_not_allowed",
    )
