"""Reasoning between two tags, such as <think> and </think>, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece, Reasoning, TextParser


@dataclass(frozen=True)
class ReasoningTags:
    """opening, closing: the tags. label: a word behind the opening one that belongs to it. inside: whether a model of
    the format reasons from its first token on, unless the prompt has closed the tag. until: a text of the answer that
    ends the reasoning too, without the closing tag. around: tags around the answer, which are no part of it."""

    opening: str = "<think>"
    closing: str = "</think>"
    label: str = ""
    inside: bool = False
    until: str = ""
    around: tuple[str, str] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        return tuple(filter(None, (self.opening, self.closing, self.until, *(self.around or ()))))

    @property
    def beginning(self) -> str:
        """The opening tag with its label."""
        return self.opening + self.label


class ThinkParser:
    """Only the beginning of an answer can be reasoning. Whitespace around the tags belongs to them.

    inside: the reasoning begins with the first character, as the prompt has the opening tag already. The tag may come
    all the same. Reasoning that never ends is reasoning to the end of the text. begun: the prompt has text behind the
    tag too, so that whitespace that comes is of the reasoning.
    """

    def __init__(self, tags: ReasoningTags, *, inside: bool, begun: bool = False) -> None:
        self._tags = tags
        self._inside = inside
        self._begins = not begun  # nothing but whitespace, or a part of the opening tag, has come
        self._trims = False  # whitespace is dropped, as a tag has just come
        self._answers = False
        self._held = ""
        self._search = MarkerSearch(tags.closing, *filter(None, [tags.until]))
        self._answer = None if tags.around is None else TaggedAnswer(*tags.around)

    def push(self, text: str) -> list[Piece]:
        if self._begins:
            self._held += text
            seen = self._held.lstrip()
            beginning = self._tags.beginning
            if beginning.startswith(seen) and seen != beginning:
                return []
            self._begins = False
            opened = seen.startswith(self._tags.opening)
            self._answers = not (opened or self._inside)
            self._trims = not self._answers
            if opened:
                self._held = seen.removeprefix(self._tags.opening).removeprefix(self._tags.label)
            text, self._held = self._held, ""
        pieces: list[Piece] = []
        if not self._answers:
            before, rest = self._search.push(self._trimmed(text))
            if before:
                pieces.append(Reasoning(before))
            if rest is None:
                return pieces
            self._answers = self._trims = True
            text = self._tags.until + rest if self._search.found.lstrip() == self._tags.until else rest
        text = self._trimmed(text)
        if self._answer is not None:
            pieces += self._answer.push(text)
        elif text:
            pieces.append(Content(text))
        return pieces

    def finish(self) -> list[Piece]:
        return self._finish() + (self._answer.finish() if self._answer is not None else [])

    def _finish(self) -> list[Piece]:
        held = self._held + self._search.flush()
        if not held or (self._begins and held.lstrip().startswith(self._tags.opening)):  # its label was cut off
            return []
        return [Reasoning(held) if self._inside or not (self._begins or self._answers) else Content(held)]

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


class TaggedAnswer:
    """Leaves out the tags around an answer, with the whitespace within them. Either may be missing."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._search = MarkerSearch(closing)
        self._held = ""  # whitespace and a part of the opening tag, until it is known not to be one
        self._begins = True
        self._trims = False

    def push(self, text: str) -> list[Piece]:
        if self._begins:
            self._held += text
            seen = self._held.lstrip()
            if self._opening.startswith(seen) and seen != self._opening:
                return []
            self._begins, self._trims = False, seen.startswith(self._opening)
            text, self._held = seen.removeprefix(self._opening) if self._trims else self._held, ""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            before, rest = self._search.push(rest)
            if before:
                pieces.append(Content(before))
        return pieces

    def finish(self) -> list[Piece]:
        held = self._held + self._search.flush()
        return [Content(held)] if held else []


def begins_inside(tags: ReasoningTags, prompt: str, continued: str | None) -> bool | None:
    """Return whether the text after `prompt` is reasoning from its first character on; None if none can follow, as it
    is closed. continued: the message that the text continues, whose last tag decides; the prompt's end does without."""
    if continued and continued.strip():
        return True if continued.rfind(tags.opening) > continued.rfind(tags.closing) else None
    end = prompt.rstrip()
    return None if end.endswith(tags.closing) else tags.inside or end.endswith((tags.opening, tags.beginning))


def think_parser(tags: ReasoningTags, prompt: str, continued: str | None = None) -> TextParser | None:
    """Make the parser of what follows `prompt`; None if it is the answer alone. continued: see `begins_inside`."""
    inside = begins_inside(tags, prompt, continued)
    if inside is None:
        return None if tags.around is None else TaggedAnswer(*tags.around)
    begun = bool((continued or "").rpartition(tags.opening)[2].removeprefix(tags.label).strip())
    return ThinkParser(tags, inside=inside, begun=begun)
