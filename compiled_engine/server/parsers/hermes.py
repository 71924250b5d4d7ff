"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from compiled_engine.server.parsers.call_marks import HERMES
from compiled_engine.server.parsers.call_object import CallObject
from compiled_engine.server.parsers.marked_calls import MarkedCalls

MARKUP = OPENING, CLOSING = HERMES.opening, *HERMES.closing


class HermesParser(MarkedCalls):
    """Reads an object between the tags."""

    def __init__(self) -> None:
        super().__init__(HERMES, CallObject)
