"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from compiled_engine.server.parsers.call_object import WHITESPACE, CallObject
from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece

MARKUP = OPENING, CLOSING = "<tool_call>", "</tool_call>"
# What models write too much of behind an object, and up to how much of it is no text.
SURPLUS, MOST_SURPLUS = "}],", 16


class HermesParser:
    """Text outside of calls is content, as is an invalid call, with its markup.

    Whitespace around a call belongs to its markup, and so do surplus brackets and commas before its closing tag. A call
    without its closing tag or its last brace is still a call.
    """

    def __init__(self) -> None:
        self._search = MarkerSearch(OPENING)
        self._call: CallObject | None = None
        self._closing: str | None = None  # after a call: what came of the closing tag
        self._surplus = ""  # what came before that
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text, pieces)
            elif self._closing is not None:
                text = self._read_closing(text, pieces)
            else:
                before, rest = self._search.push(text)
                if before:
                    pieces.append(Content(before))
                if rest is not None:
                    self._call = CallObject()
                text = rest or ""
        return pieces

    def finish(self) -> list[Piece]:
        held = self._search.flush()
        if self._call is not None and not self._call.begun:
            held = OPENING + self._call.raw
        elif self._closing is not None:
            held = self._surplus + self._closing if self._closing not in ("", CLOSING) else ""
        return [Content(held)] if held else []

    def _read_call(self, call: CallObject, text: str, pieces: list[Piece]) -> str:
        """Read on in a call; what follows it."""
        text = call.read(text, self._count, pieces)
        if call.failed or call.closed:
            self._call = None
            self._count += call.begun
            if call.begun:
                self._closing = self._surplus = ""
            else:
                pieces.append(Content(OPENING + call.raw))
        return text

    def _read_closing(self, text: str, pieces: list[Piece]) -> str:
        """Read on after a call, where whitespace, surplus, the closing tag and whitespace again say nothing."""
        seen = self._closing or ""
        for place, character in enumerate(text):
            if character in WHITESPACE and seen in ("", CLOSING):
                continue
            if not seen and character in SURPLUS and len(self._surplus) < MOST_SURPLUS:
                self._surplus += character
                continue
            if seen == CLOSING or not CLOSING.startswith(seen + character):
                self._closing = None
                return ("" if seen == CLOSING else self._surplus + seen) + text[place:]
            seen += character
        self._closing = seen
        return ""
