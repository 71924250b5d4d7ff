"""Address of the server under test, and the queries to it that precede the load."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
TIMEOUT_S = 30.0
POLL_S = 0.05


class Target(msgspec.Struct, frozen=True):
    """Address of a server's API, and the headers of requests to it."""

    scheme: str
    host: str
    port: int
    path: str  # of the API, such as /v1
    headers: tuple[tuple[str, str], ...]  # of every request, except content-length

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, which checks certificates; None for plain HTTP."""
        return ssl.create_default_context() if self.scheme == "https" else None

    def request(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a complete POST request. path: below the API's path."""
        lines = [f"POST {self.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers)]
        lines.append(f"content-length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request; return status and body. path: from the server's root. Raises OSError or HTTPException."""
        connect = HTTPSConnection if self.scheme == "https" else HTTPConnection
        connection = connect(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=dict(self.headers))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def parse_target(url: str, api_key: str | None, headers: Sequence[str]) -> Target:
    """Make a Target from a URL, which may end with /v1, and headers NAME=VALUE.

    api_key: sent as a bearer token; None: not sent. Raises ValueError, which names the invalid option.
    """
    error = ValueError(f"url is {url!r}; allowed: http://HOST:PORT or https://HOST:PORT")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise error from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise error
    fields = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", "accept": "*/*"}
    if api_key is not None:
        if not api_key.isprintable() or not api_key.isascii():
            raise ValueError("api_key is not printable ASCII, which it must be")
        fields["authorization"] = f"Bearer {api_key}"
    for header in headers:
        name, is_set, value = header.partition("=")
        if not is_set or not name.strip() or not (name + value).isprintable() or not (name + value).isascii():
            raise ValueError(f"header is {header!r}; allowed: NAME=VALUE in printable ASCII")
        fields[name.strip().lower()] = value.strip()
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    return Target(parts.scheme, parts.hostname, port, path, tuple(fields.items()))


def find_model(target: Target, model: str | None, ready_timeout_s: float) -> tuple[str, int | None]:
    """Return (the model's name, its context length or None if not reported). model: None for the server's first model.

    Waits up to `ready_timeout_s` seconds for the server to answer. Raises ValueError if the server does not answer, or
    if it has no model with this name.
    """
    deadline = time.monotonic() + ready_timeout_s
    while True:
        try:
            status, body = target.get(f"{target.path}/models")
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
        else:
            if status == 200:
                return _chosen(target, body, model)
            reason = f"it answers {status}: {body[:200].decode(errors='replace')}"
            if status not in (502, 503):
                break
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    raise ValueError(f"url is {target.url!r}, where no list of models is to be had: {reason}")


def _chosen(target: Target, body: bytes, model: str | None) -> tuple[str, int | None]:
    try:
        cards: list[dict[str, Any]] = list(json.loads(body)["data"])
        names = [str(card["id"]) for card in cards]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"url is {target.url!r}, whose /models is none of OpenAI's kind") from None
    if not names:
        raise ValueError(f"url is {target.url!r}, which serves no model")
    if model is not None and model not in names:
        raise ValueError(f"model is {model!r}; allowed: {', '.join(names)}")
    card = cards[0 if model is None else names.index(model)]
    most = card.get("max_model_len")
    return str(card["id"]), most if isinstance(most, int) else None
