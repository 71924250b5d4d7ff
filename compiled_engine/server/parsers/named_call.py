"""Read a call with the tool's name before its arguments, such as `add<｜tool▁sep｜>{"a": 1}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from compiled_engine.server.parsers.call_object import WHITESPACE
from compiled_engine.server.parsers.marker_search import JsonValue
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Piece

NAME = ""
LONGEST_NAME = 300


class Arguments(Protocol):
    """Reads arguments character by character, from the opening brace on."""

    closed: bool  # The arguments are complete.
    failed: bool  # The last character cannot be part of the arguments.

    def push(self, character: str) -> str:
        """Read a character. Return the JSON that it completes."""
        ...


class JsonArguments:
    """Reads arguments that are JSON."""

    failed = False

    def __init__(self) -> None:
        self.closed = False
        self._value = JsonValue()

    def push(self, character: str) -> str:
        self.closed = self._value.ends_with(character)
        return character


class NamedCall:
    """Reads one call with optional whitespace between its parts, and streams its arguments.

    The fields have the same meaning as in `CallObject`. The head is the text before the arguments. `read` returns an
    invalid head together with the text after it, since the head may contain the mark of another call.
    """

    def __init__(
        self,
        head: Sequence[str],
        make_arguments: Callable[[], Arguments] = JsonArguments,
        call_of: Callable[[str], tuple[str, str | None]] = lambda written: (written, None),
    ) -> None:
        """`head` has the texts before the arguments, with NAME in the place of the tool's name.

        `call_of` converts the text in the place of NAME to the tool's name and the call's id. If the text has no id,
        the id is None.
        """
        self.begun = self.closed = self.failed = False
        self.raw = ""
        self._head = head
        self._place = 0  # index of the current part of the head
        self._seen = ""  # text read of this part
        self._name, self._id = "", None  # type: str, str | None
        self._arguments = make_arguments()
        self._call_of = call_of

    def read(self, text: str, index: int, pieces: list[Piece]) -> str:
        for place, character in enumerate(text):
            self.failed = not self._take(character, index, pieces)
            if self.closed:
                return text[place + 1 :]
            if self.failed:
                rest, self.raw = self.raw + text[place:], ""
                return rest
            if not self.begun:
                self.raw += character
        return ""

    def _take(self, character: str, index: int, pieces: list[Piece]) -> bool:
        """Read a character. Return whether the text so far may still be a call."""
        if self._place == len(self._head):
            return self._in_arguments(character, index, pieces)
        part = self._head[self._place]
        if not self._seen and character in WHITESPACE:
            return True
        if part != NAME:
            self._seen += character
            if self._seen != part:
                return part.startswith(self._seen)
            self._place, self._seen = self._place + 1, ""
            return True
        following = self._head[self._place + 1] if self._place + 1 < len(self._head) else "{"
        if character not in (following[0], "\n"):
            self._seen += character
            return len(self._seen) <= LONGEST_NAME
        self._name, self._id = self._call_of(self._seen.strip())
        self._place, self._seen = self._place + 1, ""
        return bool(self._name) and self._take(character, index, pieces)

    def _in_arguments(self, character: str, index: int, pieces: list[Piece]) -> bool:
        if not self.begun:
            if character != "{":
                return character in WHITESPACE
            pieces.append(CallStart(index, self._name, self._id))
            self.begun, self.raw = True, ""
        if text := self._arguments.push(character):
            pieces.append(CallArguments(index, text))
        self.closed = self._arguments.closed
        return not self._arguments.failed
