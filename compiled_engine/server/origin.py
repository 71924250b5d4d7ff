"""Parse origins of web pages, from the option allowed_origin and from request headers."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import NamedTuple

_ORIGIN = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535


class Origin(NamedTuple):
    """An origin: scheme, host and port. An IPv6 host has no brackets."""

    scheme: str
    host: str
    port: int


def read_origin(text: str) -> Origin | None:
    """Parse an origin such as https://chat.example:8080. Returns None for anything else, such as a URL with a path."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        return None
    scheme, host, port = found.groups()
    number = _DEFAULT_PORTS[scheme] if port is None else int(port)
    if not 1 <= number <= _LAST_PORT:
        return None
    if host.startswith("["):
        try:
            host = str(IPv6Address(host[1:-1]))
        except ValueError:
            return None
    return Origin(scheme, host, number)
