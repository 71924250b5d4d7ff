"""`response_format`: text is what there is without it."""

from __future__ import annotations

from typing import Any

from compiled_engine.server.errors import bad_request, shown


def require_text_format(response_format: dict[str, Any] | None, name: str = "response_format") -> None:
    """Raise ApiError 400 for structured output, which is not there yet."""
    kind = "text" if response_format is None else response_format.get("type")
    if kind != "text":
        raise bad_request(
            name, f"{name}.type {shown(kind)} is not supported yet; allowed: 'text'", code="unsupported_parameter"
        )
