"""Reads images from URLs: from data in the URL, and from local files and hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from compiled_engine.features.images.frontend.download import Downloader, PromptDownloads, Target
from compiled_engine.features.images.frontend.sources import MediaSource, file_source, opener_within, read_file

PORTS = {"http": 80, "https": 443}
# data:, a media type of images and parameters, then base64.
_DATA = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
# Characters that URLs have only in encoded form, and a backslash, which some readers take for a slash.
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\]|[^\x00-\x7f]")
LONGEST_URL = 8192  # characters, of URLs that are fetched


@dataclass(frozen=True)
class UrlPolicy:
    """Reads images from URLs: from any data: URL, and from the hosts and local files that the operator allows.

    domains: hosts, or `host:port`, from which images are fetched. folder: local files within it are read.
    """

    domains: tuple[str, ...] = ()
    folder: Path | None = None

    def read(self, url: str, downloader: Downloader | PromptDownloads) -> MediaSource:
        """Return the source of the image at a URL; fetches it if the policy allows the host.

        Raises ValueError with the reason, and what is allowed.
        """
        kind = url[: url.find(":")].lower() if ":" in url[:8] else ""
        if kind == "data":
            return file_source(read_data_url(url))
        if kind in PORTS:
            return file_source(downloader.fetch(self.target(url)))
        if kind == "file":
            return file_source(self._local_file(url))
        raise ValueError(f"the URL {_shown(url)} has no scheme that is read; allowed: data, http or https, or file")

    def target(self, url: str) -> Target:
        """Return where to connect for an http or https URL. Raises ValueError if the policy does not allow it."""
        if len(url) > LONGEST_URL:
            raise ValueError(f"the URL has {len(url)} characters; allowed: at most {LONGEST_URL}")
        if _NOT_IN_URLS.search(url):
            raise ValueError(f"the URL {_shown(url)} must not have spaces, backslashes or unencoded characters")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise ValueError(f"the URL {_shown(url)} is malformed: {error}") from None
        scheme = parts.scheme.lower()
        if not host or "@" in parts.netloc:
            raise ValueError(f"the URL {_shown(url)} must have a host, and no user name")
        port = PORTS[scheme] if port is None else port
        if not _is_allowed(host, port, scheme, self.domains):
            allowed = f"{', '.join(self.domains)} (allowed_media_domains)" if self.domains else "data: URLs only"
            raise ValueError(f"images are not fetched from {host}:{port}; allowed: {allowed}")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return Target(scheme, host, port, path)

    def _local_file(self, url: str) -> bytes:
        """Return the content of a file: URL within the folder. Raises ValueError for any other path."""
        if self.folder is None:
            raise ValueError("file: URLs are not read; allowed: data: URLs, or a folder (allowed_local_media_path)")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"the URL {_shown(url)} must not have a host")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
        except (OSError, ValueError):  # also for a path with a null character
            path = None
        folder = self.folder.resolve()
        if path is None or path == folder or not path.is_relative_to(folder):
            raise ValueError(f"the URL {_shown(url)} is no file within the folder that may be read")
        # The path's links are resolved above. A link that was added since is not followed.
        return read_file(path.relative_to(folder), opener_within(folder))


def read_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises ValueError unless it is base64 of an image."""
    found = _DATA.match(url)
    if found is None:
        raise ValueError(f"a data: URL must begin with data:image/TYPE;base64, got {_shown(url)}")
    try:
        return base64.b64decode(url[found.end() :].strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data: URL is not valid base64: {error}") from None


def _is_allowed(host: str, port: int, scheme: str, domains: Sequence[str]) -> bool:
    allowed = {domain.lower().rstrip(".") for domain in domains}
    return f"{host}:{port}" in allowed or (host in allowed and port == PORTS[scheme])


def _shown(url: str) -> str:
    return repr(url if len(url) <= 80 else f"{url[:80]}...")
