"""Pages for browsers: the chat page at /, and the compiler report at /debug/inspect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.config import EngineConfig, json_value
from compiled_engine.server.serving import serving_of

if TYPE_CHECKING:
    from compiled_engine.graphs.inspection.report import Report

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Content only from this server, no inline scripts or styles, no framing by other pages.
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
    """Return the files of the chat page by request path."""
    files = {f"/page/{file.name}": file for file in sorted(FOLDER.iterdir())}
    return {"/": files.pop("/page/index.html"), **files}


def answers(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that sends the file.

    The file reveals nothing about the model or the server, so it needs no key.
    """
    body = file.read_bytes()
    headers = {**HEADERS, "content-type": f"{TYPES[file.suffix]}; charset=utf-8"}

    async def answer(request: Request) -> Response:
        return Response(body, headers=headers)

    return answer


PATH = "/debug/inspect"
# The report has inline styles and scripts, and loads nothing.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class Inspection:
    """Handles GET /debug/inspect: sends the report of `compiled-engine inspect` for the running engine.

    It makes one report at a time. The report contains folder names of the server, so an option must enable it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        engine = serving_of(request).engine
        as_json = request.query_params.get("format") == "json"
        async with self._lock:
            return await asyncio.to_thread(_response, engine.config, await engine.metrics(), as_json)


def _response(config: EngineConfig, metrics: Mapping[str, Any], as_json: bool) -> Response:
    from compiled_engine.graphs.inspection.html import render_html  # imported on request, not with every server

    report = report_of_engine(config, metrics)
    if as_json:
        return Response(json.dumps(report.data), headers={"content-type": "application/json"})
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": REPORT_POLICY}
    return Response(render_html(report), headers={**headers, "x-content-type-options": "nosniff"})


def report_of_engine(config: EngineConfig, metrics: Mapping[str, Any]) -> Report:
    """Return the report of `compiled-engine inspect`. `metrics` is the result of `AsyncLLM.metrics`."""
    from compiled_engine.graphs.inspection.report import CompiledEntry, make_report

    folder = metrics["cache_entry"]
    entry = None if folder is None else CompiledEntry.of(config, Path(folder), metrics["cache"])
    return make_report(json_value(config), entry, metrics["start_up"], metrics)
