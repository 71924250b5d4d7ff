"""A small server on the loopback interface that plays the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a" * 34


@dataclass
class PlayedRepository:
    """A repository that the played hub serves."""

    revisions: dict[str, str]  # branch or tag -> commit
    commits: dict[str, dict[str, bytes]]  # commit -> files
    gated: bool = False  # files require TOKEN


@dataclass
class PlayedHub:
    """A played hub: its address, its repositories, and the requests that it got."""

    endpoint: str = ""
    repositories: dict[str, PlayedRepository] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)  # method, path and range of bytes of each request, in order

    def files_sent(self, name: str) -> set[str]:
        """Return the files of a repository whose whole contents were requested."""
        pattern = rf"GET /{name}/resolve/[^/]+/(\S*)"
        return {match[1] for line in self.requested if (match := re.fullmatch(pattern, line))}


@contextmanager
def played_hub() -> Iterator[PlayedHub]:
    """Start a played hub without repositories, and yield it."""
    hub = PlayedHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            part = self.headers.get("Range")
            hub.requested.append(f"{self.command} {path}" + (f" {part}" if part else ""))
            found = re.fullmatch(r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>.+)", path)
            found = found or re.fullmatch(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
            if found is None or found["name"] not in hub.repositories:
                return self._refuse(404, "RepoNotFound")
            repository = hub.repositories[found["name"]]
            commit = repository.revisions.get(found["revision"], found["revision"])
            if commit not in repository.commits:
                return self._refuse(404, "RevisionNotFound")
            files = repository.commits[commit]
            if "file" not in found.groupdict():
                siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
                return self._send(json.dumps({"id": found["name"], "sha": commit, "siblings": siblings}).encode())
            if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
            if found["file"] not in files:
                return self._refuse(404, "EntryNotFound")
            content = files[found["file"]]
            etag = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            if part and (span := re.fullmatch(r"bytes=(\d+)-(\d+)", part)):
                return self._send(content[int(span[1]) : int(span[2]) + 1], headers, 206)
            return self._send(content, headers)

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def _send(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
