"""Convert arguments in Gemma's syntax, such as {city:<|"|>Paris<|"|>,days:3}, to JSON while they arrive."""

from __future__ import annotations

import json

from compiled_engine.server.parsers.call_object import WHITESPACE
from compiled_engine.server.parsers.marker_search import JsonValue

CLOSING = {"{": "}", "[": "]"}
# Templates write Python literals into prompts, so models write them too.
WORDS = {"True": "true", "False": "false", "None": "null"}


class GemmaArguments:
    """Reads an object with unquoted keys, and strings between two marks `quote`. Also accepts JSON."""

    def __init__(self, quote: str) -> None:
        # closed: the object is complete. failed: the last character cannot be part of it.
        self.closed = self.failed = False
        self._quote = quote
        self._open: list[str] = []  # brackets
        self._is_key = False
        self._owes_value = False  # a key was read
        self._comma = ""  # due before the next key or value
        self._seen = ""  # the current quote, or unquoted key or value
        self._json = JsonValue()
        self._read = self._in_start

    def push(self, character: str) -> str:
        """Read a character; return the JSON that it completes."""
        return self._read(character)

    def _in_start(self, character: str) -> str:
        """Read a character before a key, a value or the end of a container. Return the JSON that it completes."""
        if character in WHITESPACE:
            return ""
        if self._open and character == CLOSING[self._open[-1]] and not self._owes_value:
            return self._end(character)
        self._owes_value = False
        if character in CLOSING and not self._is_key:
            self._open.append(character)
            self._is_key = character == "{"
            return self._due() + character
        if character == '"':
            self._json, self._read = JsonValue(), self._in_json_text
            return self._due() + self._in_json_text(character)
        self._read = self._in_quote if character == self._quote[0] else self._in_bare
        return self._read(character)

    def _in_quote(self, character: str) -> str:
        self._seen += character
        if self._seen == self._quote:
            self._seen, self._read = "", self._in_text
            return self._due() + '"'
        return "" if self._quote.startswith(self._seen) else self._fail()

    def _in_text(self, character: str) -> str:
        self._seen += character
        if self._seen == self._quote:
            return '"' + self._after_part()
        if self._quote.startswith(self._seen):
            return ""
        # The quote did not continue, but another may begin with this character.
        text = self._seen[:-1] if character == self._quote[0] else self._seen
        self._seen = self._seen[len(text) :]
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def _in_json_text(self, character: str) -> str:
        return character + (self._after_part() if self._json.ends_with(character) else "")

    def _in_bare(self, character: str) -> str:
        if character not in (":" if self._is_key else ",}]"):
            self._seen += character
            return self._fail() if character in '{}[]",' else ""
        word = self._seen.strip()
        if not word:
            return self._fail()
        text = self._due() + (json.dumps(word, ensure_ascii=False) if self._is_key else _json_of(word))
        return text + self._after_part() + self._read(character)

    def _after_part(self) -> str:
        self._seen, self._read = "", self._in_colon if self._is_key else self._in_comma
        return ""

    def _in_colon(self, character: str) -> str:
        if character == ":":
            self._is_key, self._owes_value, self._read = False, True, self._in_start
            return ": "
        return "" if character in WHITESPACE else self._fail()

    def _in_comma(self, character: str) -> str:
        if character == ",":
            self._comma, self._read = ", ", self._in_start
            self._is_key = self._open[-1] == "{"
            return ""
        if character == CLOSING[self._open[-1]]:
            return self._end(character)
        return "" if character in WHITESPACE else self._fail()

    def _end(self, character: str) -> str:
        self._open.pop()
        self.closed = not self._open
        self._comma, self._is_key, self._read = "", False, self._in_comma
        return character

    def _due(self) -> str:
        comma, self._comma = self._comma, ""
        return comma

    def _fail(self) -> str:
        self.failed = True
        return ""


def _json_of(word: str) -> str:
    """Return the JSON of an unquoted value: a number or JSON literal, otherwise a string."""
    word = WORDS.get(word, word)
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
