"""Parse reasoning between two tags, such as <think> and </think>, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.server.parsers.marker_search import MarkerSearch
from compiled_engine.server.parsers.pieces import Content, Piece, Reasoning, TextParser


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around a model family's reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"
    label: str = ""  # a word after the opening tag that belongs to it
    inside: bool = False  # The model reasons from its first token on, unless the prompt has the closing tag.
    until: str = ""  # text of the answer that also ends the reasoning, without the closing tag
    around: tuple[str, str] | None = None  # tags around the answer, which are dropped

    @property
    def texts(self) -> tuple[str, ...]:
        """All tags and texts that may be special tokens."""
        return tuple(filter(None, (self.opening, self.closing, self.until, *(self.around or ()))))

    @property
    def beginning(self) -> str:
        """The opening tag and the label that belongs to it."""
        return self.opening + self.label


class ThinkParser:
    """Splits an answer that may begin with reasoning. Drops the tags of the reasoning and the whitespace around them.

    Reasoning without a closing tag extends to the end of the text.
    """

    def __init__(self, tags: ReasoningTags, *, inside: bool, begun: bool = False) -> None:
        """With `inside`, the text begins as reasoning; it may repeat the opening tag.

        With `begun`, the prompt already has some of the reasoning, so that leading whitespace belongs to the reasoning.
        """
        self._tags = tags
        self._inside = inside
        self._begins = not begun  # only whitespace, or part of the opening tag, was read
        self._trims = False  # drops whitespace after a tag
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
    """Drops the two tags around an answer, and the whitespace between tags and answer.

    The answer may lack either tag.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._search = MarkerSearch(closing)
        self._held = ""  # whitespace and possibly part of the opening tag
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
    """Return True if the text after `prompt` begins as reasoning, and None if the reasoning has already ended.

    Otherwise return False: the text may begin with the opening tag.

    `continued` is the message that the text continues, or None. If that message has text, its last tag decides; without
    a tag, the reasoning has ended. Otherwise the tag at the prompt's end decides; without a tag, `tags.inside` decides.
    """
    if continued and continued.strip():
        return True if continued.rfind(tags.opening) > continued.rfind(tags.closing) else None
    end = prompt.rstrip()
    return None if end.endswith(tags.closing) else tags.inside or end.endswith((tags.opening, tags.beginning))


def think_parser(tags: ReasoningTags, prompt: str, continued: str | None = None) -> TextParser | None:
    """Return the parser for the text after `prompt`, or None if that text is all content, without tags to drop.

    See `begins_inside` for `continued`.
    """
    inside = begins_inside(tags, prompt, continued)
    if inside is None:
        return None if tags.around is None else TaggedAnswer(*tags.around)
    begun = bool((continued or "").rpartition(tags.opening)[2].removeprefix(tags.label).strip())
    return ThinkParser(tags, inside=inside, begun=begun)
