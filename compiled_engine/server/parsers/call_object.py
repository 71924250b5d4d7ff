"""Read a call that is a JSON object, such as {"name": "add", "arguments": {"a": 1}}, character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from compiled_engine.server.parsers.marker_search import JsonValue
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Piece

ARGUMENTS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"


class CallObject:
    """Reads one call that is an object with keys in any order, and streams its arguments."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names` are the names of the tools that may be called; None for any."""
        self.name: str | None = None  # the tool's name, once `begun`
        # It is certainly a call: the name and the beginning of the arguments are known, or the object is complete
        # without arguments.
        self.begun = False
        self.closed = False  # The object is complete.
        # It is not a call or, once begun, no longer valid. The character that shows this is not part of it.
        self.failed = False
        self.raw = ""  # the object's text so far, until `begun`
        self._names = names
        self._expected = "object"
        self._key = ""
        self._text = ""  # the current key or value
        self._value = JsonValue()
        self._arguments: str | None = None  # not emitted yet; None until they begin

    def read(self, text: str, index: int, pieces: list[Piece]) -> str:
        """Read to the end of the text or of the object, and return the text after the object.

        At the end of the object, `closed` or `failed` is set. The parts of the call that are certain are appended to
        `pieces`; `index` is the call's number among the calls of the answer.
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
        """Read a character. Return the text of the arguments that is now certain."""
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
        if character == "}":  # also after a trailing comma, which some models write
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
        """Store a complete value. Return whether the object may still be a call.

        The first of several equal keys counts.
        """
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
    """Return whether a call's arguments are complete JSON; an answer may end within them."""
    return decoded(arguments) is not None


NULL = ("null",)  # the result of `decoded` for null, since None means that the text is no JSON


def decoded(text: str) -> Any:
    """Return the value of JSON text; for null, the constant NULL, since None has another meaning.

    Returns None for invalid JSON, and for a string with an unpaired surrogate.
    """
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return NULL if value is None else value
