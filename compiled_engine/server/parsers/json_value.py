"""Where a JSON value ends in text that arrives character by character."""

from __future__ import annotations


class JsonValue:
    """Follows a string, an object or an array from its first character on; other values have no end of their own.

    Brackets are counted and strings are skipped; whether the text between them is JSON is not checked.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def ends_with(self, character: str) -> bool:
        """Take in the next character; whether the value is complete with it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
