"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece, Reasoning

OPENING, CLOSING = "<think>", "</think>"


class ThinkParser:
    """Only the beginning of an answer can be reasoning. Whitespace around the tags belongs to them.

    inside: the reasoning begins with the first character, as the prompt has the opening tag already. The tag may come
    all the same. Reasoning that never ends is reasoning to the end of the text. begun: the prompt has text behind the
    tag too, so that whitespace that comes is of the reasoning.
    """

    def __init__(self, *, inside: bool, begun: bool = False) -> None:
        self._inside = inside
        self._begins = not begun  # nothing but whitespace, or a part of the opening tag, has come
        self._trims = False  # whitespace is dropped, as a tag has just come
        self._answers = False
        self._held = ""
        self._search = MarkerSearch(CLOSING)

    def push(self, text: str) -> list[Piece]:
        if self._begins:
            self._held += text
            seen = self._held.lstrip()
            if OPENING.startswith(seen) and seen != OPENING:
                return []
            self._begins = False
            opened = seen.startswith(OPENING)
            self._answers = not (opened or self._inside)
            self._trims = not self._answers
            text, self._held = (seen.removeprefix(OPENING) if opened else self._held), ""
        pieces: list[Piece] = []
        if not self._answers:
            before, rest = self._search.push(self._trimmed(text))
            if before:
                pieces.append(Reasoning(before))
            if rest is None:
                return pieces
            self._answers = self._trims = True
            text = rest
        text = self._trimmed(text)
        if text:
            pieces.append(Content(text))
        return pieces

    def finish(self) -> list[Piece]:
        held = self._held + self._search.flush()
        if not held:
            return []
        return [Reasoning(held) if self._inside or not (self._begins or self._answers) else Content(held)]

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
