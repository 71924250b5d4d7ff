"""Parse DeepSeek's calls: V3 and R1 fence the arguments, V3.1 writes them directly after the name."""

from __future__ import annotations

from compiled_engine.server.parsers.call_marks import DEEPSEEK_V3, DEEPSEEK_V31
from compiled_engine.server.parsers.marked_calls import MarkedCalls
from compiled_engine.server.parsers.named_call import NAME, NamedCall

KIND, SEPARATOR, FENCE = "function", "<｜tool▁sep｜>", "```json"
MARKUP = (*DEEPSEEK_V31.texts, SEPARATOR)


class DeepSeekV3Parser(MarkedCalls):
    """Reads `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, fences with the arguments, and `<｜tool▁call▁end｜>`."""

    def __init__(self) -> None:
        super().__init__(DEEPSEEK_V3, lambda: NamedCall((KIND, SEPARATOR, NAME, FENCE)))


class DeepSeekV31Parser(MarkedCalls):
    """Reads `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    def __init__(self) -> None:
        super().__init__(DEEPSEEK_V31, lambda: NamedCall((NAME, SEPARATOR)))
