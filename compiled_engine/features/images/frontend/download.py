"""Fetch images over HTTP: one resolution of the name, public addresses only, no redirects, bounds on time and bytes."""

from __future__ import annotations

import http.client
import ipaddress
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from compiled_engine.features.images.frontend.bounds import MOST_FILE_BYTES
from compiled_engine.process.smallest_first import Stopped, WorkStopped, never

# Seconds for the resolution of a host's name, and again for the image.
LONGEST_S = 10.0
# Seconds and bytes for all images of a prompt.
LONGEST_OF_PROMPT_S, MOST_OF_PROMPT_BYTES = 30.0, 4 * MOST_FILE_BYTES
# Networks that embed an IPv4 address, which may be a private one.
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))


class Target(NamedTuple):
    """The place of an image on the network."""

    scheme: str
    host: str
    port: int
    path: str  # with the query


def require_public(address: str) -> None:
    """Raise ValueError for an address that is not of the public internet, such as loopback or link-local."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    is_of_site = isinstance(found, ipaddress.IPv6Address) and found.is_site_local
    translated = found.version == 6 and any(found in network for network in _TRANSLATED)
    if not found.is_global or found.is_multicast or found.is_reserved or is_of_site or translated:
        raise ValueError("its address is not of the public internet")


class Downloader:
    """Fetches images. require_address: raises ValueError for addresses to which no connection may be made.

    longest_s: most seconds for the resolution of a host's name, and again for the image.
    """

    def __init__(self, require_address: Callable[[str], None] = require_public, longest_s: float = LONGEST_S) -> None:
        self._require_address, self._longest_s = require_address, longest_s

    def fetch(self, target: Target, longest_s: float = math.inf) -> bytes:
        """Fetch an image, and return the bytes of the response's body.

        longest_s: like the downloader's limit, which applies too. Raises ValueError for every failure; its
        message omits details of the network, such as addresses.
        """
        longest_s = min(longest_s, self._longest_s)
        try:
            address = self._resolve(target, longest_s)
            return self._fetch(target, address, longest_s)
        except ValueError as error:
            raise ValueError(f"the image at {target.host}:{target.port} cannot be fetched: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = "it took too long" if isinstance(error, TimeoutError) else "the connection failed"
            raise ValueError(f"the image at {target.host}:{target.port} cannot be fetched: {reason}") from None

    def _resolve(self, target: Target, longest_s: float) -> str:
        """Resolve the target's host name once, and return its first address.

        Raises ValueError if the name cannot be resolved or any of its addresses is not allowed, and TimeoutError after
        `longest_s` seconds.
        """
        resolving: Future[list[Any]] = Future()

        def resolve() -> None:
            try:
                resolving.set_result(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
            except Exception as error:
                resolving.set_exception(error)

        threading.Thread(target=resolve, daemon=True).start()  # getaddrinfo takes no limit of time
        try:
            found = resolving.result(longest_s)
        except TimeoutError:
            raise
        except (OSError, UnicodeError):
            raise ValueError("its name cannot be resolved") from None
        addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            self._require_address(address)
        return addresses[0]

    def _fetch(self, target: Target, address: str, longest_s: float) -> bytes:
        begin_s = time.monotonic()
        plain = socket.create_connection((address, target.port), timeout=longest_s)
        # A server that sends a byte now and then passes every timeout of a single read.
        is_over = threading.Event()
        with plain, plain.dup() as same:  # TLS takes over the first

            def end() -> None:
                is_over.set()
                with suppress(OSError):
                    same.shutdown(socket.SHUT_RDWR)

            clock = threading.Timer(max(0.0, begin_s + longest_s - time.monotonic()), end)
            clock.daemon = True
            clock.start()
            try:
                data = self._read(target, plain)
                if is_over.is_set():  # a body without a length ends where the connection does
                    raise TimeoutError
                return data
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise TimeoutError if is_over.is_set() else error from None
            finally:
                clock.cancel()

    def _read(self, target: Target, plain: socket.socket) -> bytes:
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = plain
        if target.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=target.host)
        try:
            has_own_port = target.port != {"http": 80, "https": 443}[target.scheme]
            host = f"{target.host}:{target.port}" if has_own_port else target.host
            headers = {"Host": host, "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", target.path, headers=headers)
            response = connection.getresponse()
            if 300 <= response.status < 400:
                raise ValueError(f"the server redirects ({response.status}), which is not followed")
            if response.status != 200:
                raise ValueError(f"the server answers {response.status}")
            if response.getheader("Content-Encoding", "identity").lower() != "identity":
                raise ValueError("the server compresses it")
            if (response.length or 0) > MOST_FILE_BYTES:
                raise ValueError(f"it has {response.length} bytes; allowed: at most {MOST_FILE_BYTES}")
            data = response.read(MOST_FILE_BYTES + 1)
            if len(data) > MOST_FILE_BYTES:
                raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
            if response.length:
                raise ValueError("the connection ended too early")
            return data
        finally:
            connection.close()


class PromptDownloads:
    """Fetches the images of a prompt, within bounds on the seconds and the bytes of all of them. Thread-safe.

    is_stopped: returns True once no caller waits for the images; nothing more is fetched then.
    """

    def __init__(
        self,
        downloader: Downloader,
        is_stopped: Stopped = never,
        longest_s: float = LONGEST_OF_PROMPT_S,
        most_bytes: int = MOST_OF_PROMPT_BYTES,
    ) -> None:
        self._downloader, self._is_stopped = downloader, is_stopped
        self._longest_s, self._end_s = longest_s, time.monotonic() + longest_s
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._lock = threading.Lock()

    def fetch(self, target: Target) -> bytes:
        """Fetch an image, and return its bytes.

        Raises ValueError as Downloader.fetch does, or if a bound of the prompt is exceeded, and WorkStopped if
        `is_stopped` returns True.
        """
        if self._is_stopped():
            raise WorkStopped("nobody waits for the image")
        if (left_s := self._end_s - time.monotonic()) <= 0:
            raise ValueError(f"the images of a prompt must be fetched within {self._longest_s:g} s")
        data = self._downloader.fetch(target, left_s)
        with self._lock:
            self._num_bytes += len(data)
            if self._num_bytes > self._most_bytes:
                raise ValueError(f"the images that a prompt fetches must have at most {self._most_bytes} bytes")
        return data
