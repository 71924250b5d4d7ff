"""Parse calls written as XML tags, with tags around each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from compiled_engine.server.parsers.argument_schemas import (
    ANY_TYPE,
    CONTAINERS,
    STRING,
    ArgumentSchemas,
    json_of,
    may_be_null,
)
from compiled_engine.server.parsers.call_object import WHITESPACE
from compiled_engine.server.parsers.marker_search import beginning_of, first_of
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece
from compiled_engine.server.parsers.xml_markup import XmlMarkup

NAME = re.compile(r"[^\s<>]*")
LONGEST_NAME = 512  # characters of a tool's or an argument's name


class XmlParser:
    """Splits text into calls and content. An invalid call, with its markup, is content.

    A call begins once its name and the beginning or end of its arguments are known. Without the enclosing tag, the name
    must be that of a tool of the request. A call may lack its closing tags, and ends at anything unexpected between its
    arguments. The first of several arguments with the same name counts.
    """

    def __init__(self, markup: XmlMarkup, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._markup = markup
        self._schemas = schemas
        self._read = self._in_content
        self._held = ""  # not read yet
        self._raw = ""  # text read, which is content if this is not a call
        self._enclosed = False  # the enclosing tag was read
        self._name = ""
        self._begun = False
        self._count = 0
        self._arguments = ArgumentSchemas({})
        self._keys: set[str] = set()
        self._value = _Value("", ANY_TYPE)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        rest = "" if self._begun else self._raw + self._held
        return [Content(rest)] if rest else []

    # Each state returns True when the next state can continue, and False when more text is needed.

    def _in_content(self, pieces: list[Piece]) -> bool:
        found = first_of(self._held, self._markup.starts)
        end = len(self._held) - beginning_of(self._held, self._markup.starts) if found is None else found[0]
        end = len(self._held[:end].rstrip())
        if end:
            pieces.append(Content(self._held[:end]))
        self._held = self._held[end:]
        if found is None:
            return False
        self._take(len(self._held) - len(self._held.lstrip()) + len(found[1]))
        self._enclosed = found[1] == self._markup.starts[0]
        self._read = self._before_call if found[1] == self._markup.opening else self._in_name
        return True

    def _before_call(self, pieces: list[Piece]) -> bool:
        tag = self._tag(self._markup.call)
        if tag is None:
            return self._give_up(pieces)
        if tag:
            self._read = self._in_name
        return tag != ""

    def _in_name(self, pieces: list[Piece]) -> bool:
        self._take_whitespace()
        found = NAME.match(self._held)
        assert found is not None
        end = found.end()
        if end == len(self._held) and end <= LONGEST_NAME:
            return False
        self._name = found.group().strip("\"'")
        known = self._enclosed or self._name in self._schemas
        if not self._name or end > LONGEST_NAME or not known or not self._held.startswith(self._markup.name_end, end):
            return self._give_up(pieces)
        self._take(end + len(self._markup.name_end))
        self._read = self._before_arguments
        return True

    def _before_arguments(self, pieces: list[Piece]) -> bool:
        tag = self._tag(self._markup.key, self._markup.call_end, self._markup.closing)
        if tag is None:
            return self._give_up(pieces)
        if tag == "":
            return False
        self._begun, self._raw = True, tag
        self._arguments, self._keys = ArgumentSchemas(self._schemas.get(self._name, {})), set()
        pieces += [CallStart(self._count, self._name), CallArguments(self._count, "{")]
        return self._follow(tag, pieces)

    def _between_arguments(self, pieces: list[Piece]) -> bool:
        self._raw = ""
        tag = self._tag(self._markup.key, self._markup.call_end, self._markup.closing)
        if tag is None:
            return self._give_up(pieces)
        return tag != "" and self._follow(tag, pieces)

    def _follow(self, tag: str, pieces: list[Piece]) -> bool:
        if tag == self._markup.key:
            self._read = self._in_key
            return True
        self._close(pieces)
        self._read = self._after_calls if tag == self._markup.closing or not self._markup.closing else self._after_call
        return True

    def _in_key(self, pieces: list[Piece]) -> bool:
        end = self._held.find(self._markup.key_end)
        if end < 0 and len(self._held) < LONGEST_NAME + len(self._markup.key_end):
            return False
        key = self._held[: max(end, 0)].strip().strip("\"'")
        if not key or end > LONGEST_NAME:
            return self._give_up(pieces)
        self._take(end + len(self._markup.key_end))
        types = self._arguments.types(key)
        if types == ANY_TYPE and not self._markup.reads_json:
            types = STRING | CONTAINERS
        before = "" if key in self._keys else f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: "
        self._keys.add(key)
        self._value = _Value(before, types)
        self._read = self._before_value
        return True

    def _before_value(self, pieces: list[Piece]) -> bool:
        tag = self._tag(self._markup.value) if self._markup.value else "none"
        if tag is None:
            return self._give_up(pieces)
        if tag:
            self._read = self._in_value
        return tag != ""

    def _in_value(self, pieces: list[Piece]) -> bool:
        ends = self._markup.value_ends
        found = first_of(self._held, ends)
        if found is not None:
            place, end = found
            text = self._value.end(self._held[:place], trims=self._markup.trims)
            self._held = self._held[place + (len(end) if end == self._markup.value_end else 0) :]
            self._read = self._between_arguments
        else:
            place = len(self._held) - beginning_of(self._held, ends)
            place -= self._held.endswith("\n", 0, place)
            text = self._value.push(self._held[:place], trims=self._markup.trims)
            self._held = self._held[place:]
        if text:
            pieces.append(CallArguments(self._count, text))
        return found is not None

    def _after_call(self, pieces: list[Piece]) -> bool:
        """Read the closing tag, or the tag of another call, after a call. Return False to wait for more text."""
        tag = self._tag(self._markup.closing, self._markup.call)
        self._raw = tag or ""
        if tag == self._markup.call:
            self._read = self._in_name
        elif tag != "":
            self._read = self._in_content if tag is None else self._after_calls
        return tag != ""

    def _after_calls(self, pieces: list[Piece]) -> bool:
        """Drop whitespace after calls. Return False to wait for more text."""
        self._raw, self._held = "", self._held.lstrip(WHITESPACE)
        if self._held:
            self._read = self._in_content
        return self._held != ""

    def _tag(self, *tags: str) -> str | None:
        """Skip whitespace and read one of the tags.

        Return the tag, "" if it is incomplete, or None if something else follows.
        """
        self._take_whitespace()
        for tag in tags:
            if tag and self._held.startswith(tag):
                self._take(len(tag))
                return tag
        return "" if any(tag.startswith(self._held) for tag in tags) else None

    def _take_whitespace(self) -> None:
        self._take(len(self._held) - len(self._held.lstrip(WHITESPACE)))

    def _take(self, length: int) -> None:
        self._raw += self._held[:length]
        self._held = self._held[length:]

    def _give_up(self, pieces: list[Piece]) -> bool:
        """End the call if it has begun. Otherwise emit the text that was read for it as content.

        Markup that was read last and does not belong to the call is content too. Returns True: no more text is needed.
        """
        raw = self._raw.lstrip() if self._begun else self._raw
        if self._begun:
            self._close(pieces)
        if raw:
            pieces.append(Content(raw))
        self._raw = ""
        self._read = self._in_content
        return True

    def _close(self, pieces: list[Piece]) -> None:
        pieces.append(CallArguments(self._count, "}"))
        self._count += 1
        self._begun, self._raw = False, ""


class _Value:
    """Converts an argument's text to JSON.

    Text that can only be a string is converted as it arrives. Other text is converted once it is complete. `trims`:
    drop a line break at the beginning of the text, and then also one at its end.
    """

    def __init__(self, before: str, types: frozenset[str]) -> None:
        """`before` is the JSON before the value; empty for a repeated argument, whose text is dropped."""
        self._before = before
        self._types = types
        self._trimmed: bool | None = None  # whether a leading line break was dropped; None before any text
        self._text: list[str] = []  # text of a value whose type is known only at its end
        self._is_string = False  # it was begun as a string

    def push(self, text: str, *, trims: bool) -> str:
        """Add text. Return the JSON that is now certain."""
        text = self._without_line_break(text, trims)
        if not text:
            return ""
        if self._is_string:
            return self._given(_escaped(text))
        self._text.append(text)
        if not self._types <= STRING | {"null"}:
            return ""
        if "null" in self._types and may_be_null("".join(self._text)):
            return ""
        self._is_string = True
        return self._given(f'{self._before}"{_escaped("".join(self._text))}')

    def end(self, text: str, *, trims: bool) -> str:
        """Add the last text. Return the remaining JSON."""
        text = self._without_line_break(text, trims)
        if self._trimmed:
            text = text.removesuffix("\n")
        if self._is_string:
            return self._given(f'{_escaped(text)}"')
        return self._given(self._before + json_of("".join(self._text) + text, self._types))

    def _without_line_break(self, text: str, trims: bool) -> str:
        if self._trimmed is None and text:
            self._trimmed = trims and text.startswith("\n")
            return text[self._trimmed :]
        return text

    def _given(self, text: str) -> str:
        return text if self._before else ""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
