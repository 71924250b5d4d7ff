"""The web page at /: plain files, which the browser may load nothing else beside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Only from this server, no script and no style within the page, and no other page around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_files() -> dict[str, Path]:
    """Path of a request -> the file that answers it."""
    files = {f"/page/{file.name}": file for file in sorted(FOLDER.iterdir())}
    return {"/": files.pop("/page/index.html"), **files}


def answers(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """GET: the file's text. It says nothing of the model or the server, so nobody needs a key for it."""
    body = file.read_bytes()
    headers = {**HEADERS, "content-type": f"{TYPES[file.suffix]}; charset=utf-8"}

    async def answer(request: Request) -> Response:
        return Response(body, headers=headers)

    return answer
