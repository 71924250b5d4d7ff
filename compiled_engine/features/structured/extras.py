"""The grammar of a request, in the extras of EngineRequest: plain data that the frontend writes and the plan reads."""

from __future__ import annotations

from typing import Any

from compiled_engine.engine.messages import EngineRequest

NAME = "structured"


def extras_of(grammar: str | None) -> dict[str, Any]:
    """Return the extras of a request with this grammar, in llguidance's form, or none."""
    return {} if grammar is None else {NAME: grammar}


def grammar_of(request: EngineRequest) -> str | None:
    """Return the grammar of a request, if it has one."""
    return request.extras.get(NAME)
