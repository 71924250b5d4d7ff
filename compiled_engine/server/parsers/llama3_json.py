"""Parse calls of Llama 3: an answer that is one JSON object, or several separated by semicolons."""

from __future__ import annotations

from collections.abc import Collection

from compiled_engine.server.parsers.call_object import WHITESPACE, CallObject
from compiled_engine.server.parsers.pieces import Content, Piece

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """Reads calls that are JSON objects and name a tool of the request. Any other JSON is content.

    <|python_tag|> may precede the first object. After the first text that is not a call, all text is content.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._call: CallObject | None = None
        self._count = 0
        self._plain = False
        self._held = ""  # text before an expected object: whitespace, and the tag or a semicolon

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text and not self._plain:
            text = self._read_before(text) if self._call is None else self._read_call(self._call, text, pieces)
        if self._plain and (text or self._held):
            pieces.append(Content(self._held + text))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        held = self._held
        if self._call is not None and not self._call.begun:
            held += self._call.raw
        if self._count and not held.strip(WHITESPACE + ";"):
            return []  # only separators after a call
        return [Content(held)] if held else []

    def _read_before(self, text: str) -> str:
        """Read the text before an object. Return the rest: the object's beginning, or text that is not a call."""
        separator = ";" if self._count else TAG
        for place, character in enumerate(text):
            seen = self._held.strip()
            if character == "{" and (seen == separator or not seen or (self._count == 0 and seen == TAG)):
                self._call = CallObject(self._names)
                return text[place:]
            if not (character in WHITESPACE and seen in ("", separator)) and not separator.startswith(seen + character):
                self._plain = True
                return text[place:]
            self._held += character
        return ""

    def _read_call(self, call: CallObject, text: str, pieces: list[Piece]) -> str:
        text = call.read(text, self._count, pieces)
        if call.begun:
            self._held = ""
        if call.failed or call.closed:
            self._call = None
            self._count += call.begun
            self._plain = call.failed
            if not call.begun:
                self._held += call.raw
        return text
