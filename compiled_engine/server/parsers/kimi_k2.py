"""Parse calls of Kimi K2, whose ids contain the tool's name, such as `functions.add:0`."""

from __future__ import annotations

import re

from compiled_engine.server.parsers.call_marks import KIMI_K2
from compiled_engine.server.parsers.marked_calls import MarkedCalls
from compiled_engine.server.parsers.named_call import NAME, NamedCall

ARGUMENTS = "<|tool_call_argument_begin|>"
MARKUP = (*KIMI_K2.texts, ARGUMENTS)
ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")


class KimiK2Parser(MarkedCalls):
    """Reads `<|tool_call_begin|>id<|tool_call_argument_begin|>{...}<|tool_call_end|>`, with or without section marks.

    A call keeps the id that the model wrote, since the template shows results under their calls' ids. If the model
    repeats an id, the later call has none.
    """

    def __init__(self) -> None:
        super().__init__(KIMI_K2, lambda: NamedCall((NAME, ARGUMENTS), call_of=self._call_of))
        self._ids: set[str] = set()

    def _call_of(self, written: str) -> tuple[str, str | None]:
        found = ID.fullmatch(written)
        call_id = None if written in self._ids else written
        self._ids.add(written)
        return found[1] if found else "", call_id
