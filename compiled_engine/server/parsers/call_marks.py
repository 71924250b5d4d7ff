"""The texts that model families write around their tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CallMarks:
    """The texts that a model writes around its tool calls. A model may leave out the `lead` and the `closing` ones."""

    opening: str  # before one call or several
    closing: tuple[str, ...] = ()  # after calls, in this order; the last belongs to the lead, if there is one
    lead: str = ""  # before the first opening
    calls: Literal["one", "lines", "list"] = "one"  # one call, one per line, or a bracketed list
    bare: bool = False  # An answer may also begin with the list, without the opening.

    @property
    def texts(self) -> tuple[str, ...]:
        """The marks `lead`, `opening` and `closing`, without empty ones."""
        return tuple(filter(None, (self.lead, self.opening, *self.closing)))


HERMES = CallMarks("<tool_call>", ("</tool_call>",))
INTERNLM = CallMarks("<|plugin|>", ("<|action_end|>",), "<|action_start|>")
GRANITE_20B_FC = CallMarks("<function_call>")
LONGCAT = CallMarks("<longcat_tool_call>", ("</longcat_tool_call>",))

GRANITE = CallMarks("<|tool_call|>", calls="list")
JAMBA = CallMarks("<tool_calls>", ("</tool_calls>",), calls="list")
PHI4_MINI = CallMarks("functools", calls="list")
XLAM = CallMarks("", calls="list", bare=True)

KIMI_K2 = CallMarks(
    "<|tool_call_begin|>", ("<|tool_call_end|>", "<|tool_calls_section_end|>"), "<|tool_calls_section_begin|>"
)
DEEPSEEK_V31 = CallMarks(
    "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁calls▁begin｜>"
)
DEEPSEEK_V3 = CallMarks(DEEPSEEK_V31.opening, ("```", *DEEPSEEK_V31.closing), DEEPSEEK_V31.lead)
GEMMA4 = CallMarks("<|tool_call>", ("<tool_call|>",))
FUNCTION_GEMMA = CallMarks("<start_function_call>", ("<end_function_call>",))

PYTHONIC = CallMarks("", calls="list", bare=True)
LLAMA4_PYTHONIC = CallMarks("<|python_start|>", ("<|python_end|>",), calls="list", bare=True)
LFM2 = CallMarks("<|tool_call_start|>", ("<|tool_call_end|>",), calls="list")
OLMO3 = CallMarks("<function_calls>", ("</function_calls>",), calls="lines")
