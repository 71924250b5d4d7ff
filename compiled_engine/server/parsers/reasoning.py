"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece, Reasoning, TextParser

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


def begins_inside(prompt: str, continued: str | None, *, from_the_start: bool) -> bool | None:
    """Return whether the text after `prompt` is reasoning from its first character on; None if none can follow, as it
    is closed. continued: the message that the text continues, whose last tag decides; the prompt's end does without.
    from_the_start: a model of the format reasons from its first token on, unless the prompt has closed the tag."""
    if continued and continued.strip():
        opened, closed = continued.rfind(OPENING), continued.rfind(CLOSING)
        return True if opened > closed else None
    end = prompt.rstrip()
    return None if end.endswith(CLOSING) else from_the_start or end.endswith(OPENING)


def think_parser(prompt: str, continued: str | None = None, *, from_the_start: bool) -> TextParser | None:
    """Make the parser of what follows `prompt`; None if the reasoning is closed already. For the arguments see
    `begins_inside`."""
    inside = begins_inside(prompt, continued, from_the_start=from_the_start)
    begun = bool((continued or "").rpartition(OPENING)[2].strip())
    return None if inside is None else ThinkParser(inside=inside, begun=begun)
