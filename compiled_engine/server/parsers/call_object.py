"""A call as a JSON object, such as {"name": "add", "arguments": {"a": 1}}, read character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from compiled_engine.server.parsers.marker_search import JsonValue
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Piece

ARGUMENTS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"


class CallObject:
    """Reads one object, with keys in any order, and returns its arguments as they arrive.

    name: of the tool, once `begun`. begun: it is certainly a call: its name and the beginning of its arguments are
    known, or the object is complete and has no arguments. closed: the object is complete. failed: it is no call (or, if
    it has begun, no object any more); the character that shows this is not part of it. raw: all its characters until it
    has begun.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """names: those of the tools that may be called; None for any."""
        self.name: str | None = None
        self.begun = False
        self.closed = False
        self.failed = False
        self.raw = ""
        self._names = names
        self._expected = "object"
        self._key = ""
        self._text = ""  # of the key or value that is being read
        self._value = JsonValue()
        self._arguments: str | None = None  # not given out yet; None until they begin

    def read(self, text: str, index: int, pieces: list[Piece]) -> str:
        """Read on until the text ends, or the object does (`closed` or `failed`); what follows the object.

        pieces: gets what is certain of the call, under this index.
        """
        for place, character in enumerate(text):
            had_begun = self.begun
            arguments = self._push(character)
            if self.begun and not had_begun:
                pieces.append(CallStart(index, str(self.name)))
            if arguments:
                pieces.append(CallArguments(index, arguments))
            if self.failed:
                return text[place:]
            if self.closed:
                return text[place + 1 :]
        return ""

    def _push(self, character: str) -> str:
        """Read a character; return the text of the arguments that it completes."""
        taken = getattr(self, f"_in_{self._expected}")(character)
        if not taken:
            self.failed = True
            return ""
        if not self.begun:
            self.raw += character
            if self.name is None or (self._arguments is None and not self.closed):
                return ""
            self.begun = True
            self.raw = ""
        arguments, self._arguments = self._arguments, ""
        return "{}" if arguments is None else arguments

    def _in_object(self, character: str) -> bool:
        if character == "{":
            self._expected = "key_start"
        return character == "{" or character in WHITESPACE

    def _in_key_start(self, character: str) -> bool:
        if character == "}":  # also behind a comma, which some models write after the last value
            return self._close()
        if character == '"':
            self._expected = "key"
            self._begin(character)
        return character == '"' or character in WHITESPACE

    def _in_key(self, character: str) -> bool:
        self._text += character
        if self._value.ends_with(character):
            key = decoded(self._text)
            if not isinstance(key, str):
                return False
            self._key, self._expected = key, "colon"
        return True

    def _in_colon(self, character: str) -> bool:
        if character == ":":
            self._expected = "value_start"
        return character == ":" or character in WHITESPACE

    def _in_value_start(self, character: str) -> bool:
        if character in WHITESPACE:
            return True
        self._begin(character)
        self._expected = "value" if character in '{["' else "literal"
        if self._key in ARGUMENTS and character == "{" and self._arguments is None:
            self._expected = "arguments"
            self._arguments = character
        return character not in ",}]:"

    def _in_arguments(self, character: str) -> bool:
        self._arguments = (self._arguments or "") + character
        if self._value.ends_with(character):
            self._expected = "comma"
        return True

    def _in_value(self, character: str) -> bool:
        self._text += character
        if self._value.ends_with(character):
            self._expected = "comma"
            return self._settle()
        return True

    def _in_literal(self, character: str) -> bool:
        if character in WHITESPACE or character in ",}":
            return self._settle() and self._in_comma(character)
        self._text += character
        return character not in '{["]:'

    def _in_comma(self, character: str) -> bool:
        if character == "}":
            return self._close()
        self._expected = "key_start" if character == "," else "comma"
        return character == "," or character in WHITESPACE

    def _begin(self, character: str) -> None:
        self._text, self._value = character, JsonValue()
        self._value.ends_with(character)

    def _settle(self) -> bool:
        """Use a complete value; return whether the object may still be a call. Only the first of equal keys counts."""
        if self._key == "name" and self.name is None:
            name = decoded(self._text)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                return False
            self.name = name
        elif self._key in ARGUMENTS and self._arguments is None:
            value = decoded(self._text)  # some models write the arguments as a string that holds JSON
            if not isinstance(value, str) and value != NULL:
                return False
            self._arguments = value if isinstance(value, str) else "{}"
        return True

    def _close(self) -> bool:
        self.closed = True
        return self.name is not None


def is_whole(arguments: str) -> bool:
    """Return whether the arguments of a call are JSON: an answer may end within them."""
    return decoded(arguments) is not None


NULL = ("null",)  # the result of `decoded` for null, since None means that the text is no JSON


def decoded(text: str) -> Any:
    """The value of a JSON text; None if it is none, or a text with half a character, which no answer could hold."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return NULL if value is None else value
