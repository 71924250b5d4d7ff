"""Parse calls of Gemma 4 and FunctionGemma, such as `<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>`."""

from __future__ import annotations

from compiled_engine.server.parsers.call_marks import CallMarks
from compiled_engine.server.parsers.gemma_arguments import GemmaArguments
from compiled_engine.server.parsers.marked_calls import MarkedCalls
from compiled_engine.server.parsers.named_call import NAME, NamedCall

KIND = "call:"
QUOTE, FUNCTION_QUOTE = '<|"|>', "<escape>"


class GemmaParser(MarkedCalls):
    """Reads calls with arguments in Gemma's syntax or in JSON. `quote` is the mark around strings."""

    def __init__(self, marks: CallMarks, quote: str) -> None:
        super().__init__(marks, lambda: NamedCall((KIND, NAME), lambda: GemmaArguments(quote)))
