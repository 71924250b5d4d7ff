"""Parse calls between marks, one by one or in a list, from text that arrives in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from compiled_engine.server.parsers.call_marks import CallMarks
from compiled_engine.server.parsers.call_object import WHITESPACE
from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece

# Surplus characters that models write after a call, and how many of them are dropped.
SURPLUS, MOST_SURPLUS = "}],", 16


class CallReader(Protocol):
    """Reads one call. `closed`, `failed` and the other fields mean the same as in `CallObject`."""

    begun: bool
    closed: bool
    failed: bool
    raw: str

    def read(self, text: str, index: int, pieces: list[Piece]) -> str:
        """Read to the end of the text or of the call (`closed` or `failed`). Return the text after the call.

        `index` and `pieces` mean the same as in `CallObject.read`.
        """
        ...


class MarkedCalls:
    """Splits text into calls and content. An invalid call, with its marks, is content.

    Whitespace around a call is dropped with the call's marks. Surplus brackets and commas before the first closing mark
    are dropped too. A call may lack its closing mark, the end of its list, or the list's commas.
    """

    def __init__(self, marks: CallMarks, make_call: Callable[[], CallReader]) -> None:
        """`make_call` creates the reader of a call, which begins after the opening mark."""
        self._marks = marks
        self._make_call = make_call
        self._search = MarkerSearch(*filter(None, [marks.opening]), lead=marks.lead)
        self._call = make_call()
        self._count = 0
        self._held = ""  # possible markup, until decided
        self._closing: list[str] = []  # marks that may still follow
        self._surplus = ""  # surplus characters before the first closing mark
        self._read = self._read_bracket if marks.bare else self._read_content

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._read(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held = self._search.flush() + (self._surplus + self._held if self._held else "")
        if self._read == self._read_call and not self._call.begun:
            held += self._call.raw
        return [Content(held)] if held else []

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        before, rest = self._search.push(text)
        if before:
            pieces.append(Content(before))
        if rest is None:
            return ""
        self._held = self._search.found
        if self._marks.calls == "list":
            self._read = self._read_bracket
        else:
            self._begin_call()
        return rest

    def _read_bracket(self, text: str, pieces: list[Piece]) -> str:
        for place, character in enumerate(text):
            if character == "[":
                self._held += character
                self._begin_call()
                return text[place + 1 :]
            if character not in WHITESPACE:
                return self._give_up(text[place:], pieces)
            self._held += character
        return ""

    def _begin_call(self) -> None:
        self._call, self._read = self._make_call(), self._read_call

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        text = self._call.read(text, self._count, pieces)
        if self._call.begun:
            self._held = ""
        if self._call.closed or self._call.failed:
            if self._call.begun:
                self._count += 1
                self._read = self._read_closing if self._marks.calls == "one" else self._read_separator
            elif self._held or self._call.raw:
                self._held += self._call.raw
                return self._give_up(text, pieces)
            else:  # no further call of a list
                self._read = self._read_closing
            self._closing = list(self._marks.closing)
        return text

    def _read_separator(self, text: str, pieces: list[Piece]) -> str:
        """Read the text after one of several calls, up to the next call or the list's end. Return the rest."""
        for place, character in enumerate(text):
            if character == "]" and self._marks.calls == "list":
                self._read = self._read_closing
                return text[place + 1 :]
            if character != "," and character not in WHITESPACE:
                self._begin_call()
                return text[place:]
        return ""

    def _read_closing(self, text: str, pieces: list[Piece]) -> str:
        """Drop whitespace, surplus characters and closing marks after a call. Return the rest of the text."""
        for place, character in enumerate(text):
            if not self._held and character in WHITESPACE:
                continue
            if not self._held and character in SURPLUS and self._may_have_surplus():
                self._surplus += character
                continue
            self._held += character
            fitting = [mark for mark in self._closing if mark.startswith(self._held)]
            if self._held in fitting:
                self._closing = self._closing[self._closing.index(self._held) + 1 :]
                self._held = self._surplus = ""
            elif not fitting:
                self._read = self._read_content
                held, self._held, self._surplus = self._surplus + self._held, "", ""
                return held + text[place + 1 :]
        return ""

    def _may_have_surplus(self) -> bool:
        marks = self._marks
        is_first = bool(marks.closing) and self._closing == list(marks.closing)
        return is_first and not marks.bare and len(self._surplus) < MOST_SURPLUS

    def _give_up(self, rest: str, pieces: list[Piece]) -> str:
        """Emit the held-back markup as content. Return `rest`, which is read as content next."""
        if self._held:
            pieces.append(Content(self._held))
        self._read, self._held = self._read_content, ""
        return rest
