"""Families of models that write a call as tags, with each argument between tags of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class XmlMarkup:
    """The tags of a family's calls.

    opening, closing: around calls; empty if the tags of a call stand alone. call, name_end: before and behind a call's
    name. call_end: behind its arguments. key, key_end: before and behind an argument's name. value, value_end: the same
    for its text; `value` is empty if the text follows the name at once. quote: around names. gap: between the tags and
    the text of an argument. trims: a line break behind the tag, and then one before the closing tag, are none of the
    text. reads_json: JSON of any type is read as such where a schema leaves the type open, not only objects and arrays.
    """

    opening: str
    closing: str
    call: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    quote: str = ""
    gap: str = ""
    trims: bool = True
    reads_json: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The whole tags, each of which may be a token."""
        given = (self.opening, self.closing, self.call, self.call_end, self.key, self.key_end)
        written = (*given, self.value, self.value_end)
        return tuple(tag for tag in written if tag.startswith("<") and tag.endswith(">"))

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags with which calls may begin."""
        return (self.opening, self.call) if self.opening else (self.call,)

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The tags that end an argument's text: its own, or where that is missing, what is written behind it."""
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
