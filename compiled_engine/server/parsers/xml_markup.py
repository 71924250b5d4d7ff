"""The XML tags of calls, by model family."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class XmlMarkup:
    """The XML tags of a model family's tool calls."""

    opening: str  # Enclose one call or several; opening and closing are empty if a call's own tags stand alone.
    closing: str
    call: str  # call and name_end: before and after a call's name
    name_end: str
    call_end: str  # after the arguments
    key: str  # key and key_end: before and after an argument's name
    key_end: str
    value: str  # value and value_end: before and after its text; `value` is empty if the text follows the name directly
    value_end: str
    quote: str = ""  # around names
    gap: str = ""  # between an argument's tags and its text
    trims: bool = True  # A line break after the tag is dropped, and then one before the closing tag.
    reads_json: bool = False  # Without a type in the schema, JSON of any type is parsed, not only objects and arrays.

    @property
    def tags(self) -> tuple[str, ...]:
        """The complete tags, each of which may be a special token."""
        given = (self.opening, self.closing, self.call, self.call_end, self.key, self.key_end)
        written = (*given, self.value, self.value_end)
        return tuple(tag for tag in written if tag.startswith("<") and tag.endswith(">"))

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags that may begin calls."""
        return (self.opening, self.call) if self.opening else (self.call,)

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The texts that end an argument's text: its closing tag or, if that is missing, what follows it."""
        end = f"{self.call_end}\n{self.closing}" if self.closing else self.call_end
        return (self.value_end, f"\n{self.key}", f"\n{end}")


QWEN3_CODER = XmlMarkup(
    opening="<tool_call>",
    closing="</tool_call>",
    call="<function=",
    name_end=">",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    gap="\n",
)
SEED_OSS = replace(QWEN3_CODER, opening="<seed:tool_call>", closing="</seed:tool_call>", gap="")
GLM45 = XmlMarkup(
    opening="",
    closing="",
    call="<tool_call>",
    name_end="",
    call_end="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    trims=False,
    reads_json=True,
)
MINIMAX_M2 = XmlMarkup(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    call="<invoke name=",
    name_end=">",
    call_end="</invoke>",
    key="<parameter name=",
    key_end=">",
    value="",
    value_end="</parameter>",
    quote='"',
)
