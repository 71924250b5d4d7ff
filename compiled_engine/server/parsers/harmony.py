"""Parse answers of gpt-oss in the harmony format: messages with headers that name a channel and a recipient.

Example, on one line: <|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary
to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>. The prompt ends with the first <|start|>assistant.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeAlias

from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning

MARKUP = START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
AUTHOR, FUNCTIONS = "assistant", "functions."
# Maximum characters of a header. The whole header is matched again for each new part, so a long one would cost much.
LONGEST_HEADER = 512
_MARKER = re.compile("|".join(map(re.escape, MARKUP)))
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w*)")
# A recipient, which may follow the author at the prompt's end.
_RECIPIENT = re.compile(r"\s*(t|to|to=\S*\s*)?")

Kind: TypeAlias = "type[Content] | type[Reasoning] | type[CallArguments]"


class HarmonyParser:
    """Reads reasoning, content and calls.

    Messages of the assistant to a function are calls. Other messages in the channel `analysis`, to other recipients, or
    by other authors are reasoning. All other messages are content. A line break separates messages of the same kind.
    Text without a header is content, and so is a header longer than LONGEST_HEADER. A header cut off by the end of the
    answer is dropped.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        """`names` are the names of the request's tools; with None, messages to functions are reasoning."""
        self._names = names
        self._held = ""  # possible beginning of a marker
        self._header: str | None = ""  # None within a message
        self._marked = False  # the header has a marker
        self._kind: Kind | None = None  # kind of the current or previous message
        self._wrote = False  # the message has text
        self._said: set[Kind] = set()
        self._count = 0

    @classmethod
    def behind(cls, prompt: str, continued: str | None, names: Collection[str] | None) -> HarmonyParser:
        """Return a parser for the text after a prompt.

        `continued` is the message that the text continues, or None; text that continues a message is content. `names`
        is the same as for the constructor.
        """
        parser = cls(None)
        if continued is not None:
            parser._begin(Content, "", [])
        else:
            place = prompt.rfind(START)
            parser.push(prompt[place:] if place >= 0 else "")
        if parser._header is not None and parser._header.strip() == AUTHOR:
            parser._header, parser._marked = "", False
        parser._names, parser._held = names, ""
        parser._said.clear()
        return parser

    @property
    def within(self) -> Kind | None:
        """The kind of the message that the next text belongs to; None if a header comes next."""
        return self._kind if self._header is None else None

    def push(self, text: str) -> list[Piece]:
        text = self._held + text
        pieces: list[Piece] = []
        place = 0
        for match in _MARKER.finditer(text):
            self._read_text(text[place : match.start()], pieces)
            self._read_marker(match[0], pieces)
            place = match.end()
        end = max(place, len(text) - _beginning(text))
        self._held = text[end:]
        self._read_text(text[place:end], pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._read_text(self._held, pieces)
        if self._header is None:
            self._end(pieces)
        elif not self._marked and "to=" not in self._header and (self._header.strip() or self._kind is None):
            self._begin(Content, self._header, pieces)
        return pieces

    def _read_text(self, text: str, pieces: list[Piece]) -> None:
        if self._header is None:
            self._say(text, pieces)
            return
        self._header += text
        fits = len(self._header) <= LONGEST_HEADER
        if not fits or not (self._marked or _RECIPIENT.fullmatch(self._header)):
            self._begin(Content, _MARKER.sub("", self._header), pieces)

    def _read_marker(self, marker: str, pieces: list[Piece]) -> None:
        """Process a marker.

        Within a message, the markers MESSAGE and CONSTRAIN are dropped, and any other marker ends the message.
        """
        if self._header is None and marker not in (MESSAGE, CONSTRAIN):
            self._end(pieces)
            self._header = ""
        if marker == MESSAGE and self._header is not None:
            name = self._function(self._header)
            if name is not None:
                pieces.append(CallStart(self._count, name))
            self._begin(_kind(self._header) if name is None else CallArguments, "", pieces)
        elif marker in (START, END, CALL, RETURN):
            self._header, self._marked = "", marker == START
        elif self._header is not None:
            self._header, self._marked = self._header + marker, True

    def _function(self, header: str) -> str | None:
        """Return the name of the function that a message with this header calls; None if it calls none."""
        recipient = header.partition("to=")[2]
        if self._names is None or _author(header) != AUTHOR:
            return None
        after = recipient.removeprefix(FUNCTIONS)
        for name in sorted(self._names, key=len, reverse=True):  # names may contain spaces
            if after.startswith(name) and after[len(name) : len(name) + 1] in ("", " ", "<"):
                return name
        return re.split(r"[\s<]", after, maxsplit=1)[0] or None if after != recipient else None

    def _begin(self, kind: Kind, text: str, pieces: list[Piece]) -> None:
        self._header, self._kind, self._wrote = None, kind, False
        self._say(text, pieces)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        kind = self._kind
        assert kind is not None
        if issubclass(kind, CallArguments):
            if not self._wrote:
                text = text.lstrip()
            if text:
                pieces.append(CallArguments(self._count, text))
        elif text:
            if not self._wrote and kind in self._said:
                pieces.append(kind("\n"))
            pieces.append(kind(text))
            self._said.add(kind)
        self._wrote = self._wrote or bool(text)

    def _end(self, pieces: list[Piece]) -> None:
        """End the current message. A call without text gets the arguments {}."""
        if self._kind is CallArguments:
            if not self._wrote:
                pieces.append(CallArguments(self._count, "{}"))
            self._count += 1


def _author(header: str) -> str:
    return re.split(r"to=|<", header, maxsplit=1)[0].strip() or AUTHOR


def _kind(header: str) -> Kind:
    is_analysis = _CHANNEL_NAME.findall(header)[-1:] == ["analysis"]
    return Reasoning if is_analysis or "to=" in header or _author(header) != AUTHOR else Content


def _beginning(text: str) -> int:
    """Return the length of the longest suffix that may be the beginning of a marker."""
    place = text.rfind("<")
    end = text[place:] if place >= 0 else ""
    return len(end) if any(marker.startswith(end) and marker != end for marker in MARKUP) else 0
