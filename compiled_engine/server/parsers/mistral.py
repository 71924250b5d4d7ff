"""Parse calls of Mistral's models: [TOOL_CALLS] and a list of objects, or a name and arguments for each call."""

from __future__ import annotations

from compiled_engine.server.parsers.call_object import WHITESPACE, CallObject
from compiled_engine.server.parsers.marker_search import JsonValue, MarkerSearch
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece

MARKER = "[TOOL_CALLS]"
CALL_ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
# Maximum characters of a name with tags and id. All of it is matched again for each character: a long one costs much.
LONGEST_BEFORE = 512
MARKUP = (MARKER, CALL_ID, ARGUMENTS)


class MistralParser:
    """Reads `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and `[TOOL_CALLS]name{...}`.

    [CALL_ID] with an id, and [ARGS], may come between name and arguments. Text before the marker or after a call is
    content, and so is an invalid call. Whitespace around calls is dropped.
    """

    def __init__(self) -> None:
        self._search = MarkerSearch(MARKER)
        self._read = self._read_content
        self._held = ""  # possible markup, until decided
        self._call = CallObject()
        self._value = JsonValue()
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._read(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held = self._search.flush() if self._read == self._read_content else self._held
        if self._read == self._read_object and not self._call.begun:
            held += self._call.raw
        return [Content(held)] if held.strip() or (held and not self._count) else []

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        before, rest = self._search.push(text)
        if before:
            pieces.append(Content(before))
        if rest is None:
            return ""
        self._read, self._held = self._read_form, self._search.found
        return rest

    def _read_form(self, text: str, pieces: list[Piece]) -> str:
        """Read whitespace after the marker, up to the bracket of a list of calls, or up to a name.

        Return the text after the bracket, or the text from the name on.
        """
        for place, character in enumerate(text):
            if character == "[":
                self._call, self._read = CallObject(), self._read_object
                self._held += character
                return text[place + 1 :]
            if character not in WHITESPACE:
                self._read = self._read_name
                return text[place:]
            self._held += character
        return ""

    def _read_object(self, text: str, pieces: list[Piece]) -> str:
        text = self._call.read(text, self._count, pieces)
        if not self._call.begun:
            return self._give_up(self._call.raw, text, pieces) if self._call.failed else text
        self._held = ""
        if self._call.failed or self._call.closed:
            self._count += 1
            self._read = self._read_separator
        return text

    def _read_separator(self, text: str, pieces: list[Piece]) -> str:
        """Read the text after an object of a list, up to the next object or the list's end. Return the rest."""
        for place, character in enumerate(text):
            if character == "{":
                self._call, self._read = CallObject(), self._read_object
                return text[place:]
            if character != "," and character not in WHITESPACE:
                self._read = self._read_after
                return text[place + (character == "]") :]
        return ""

    def _read_name(self, text: str, pieces: list[Piece]) -> str:
        for place, character in enumerate(text):
            before = self._held.lstrip().removeprefix(MARKER).lstrip()
            if character == "{" and (name := _name_before_arguments(before)):
                pieces.append(CallStart(self._count, name))
                self._read, self._held, self._value = self._read_arguments, "", JsonValue()
                return text[place:]
            if not _may_precede_arguments(before + character):
                return self._give_up("", text[place:], pieces)
            self._held += character
        return ""

    def _read_arguments(self, text: str, pieces: list[Piece]) -> str:
        for place, character in enumerate(text):
            if self._value.ends_with(character):
                pieces.append(CallArguments(self._count, text[: place + 1]))
                self._count += 1
                self._read = self._read_after
                return text[place + 1 :]
        pieces.append(CallArguments(self._count, text))
        return ""

    def _read_after(self, text: str, pieces: list[Piece]) -> str:
        """Drop whitespace after the calls. Return the rest of the text."""
        rest = text.lstrip(WHITESPACE)
        if rest:
            self._read = self._read_content
        return rest

    def _give_up(self, raw: str, rest: str, pieces: list[Piece]) -> str:
        """Emit an invalid call as content. Return `rest`, which is read as content next."""
        if self._held + raw:
            pieces.append(Content(self._held + raw))
        self._read, self._held = self._read_content, ""
        return rest


def _may_precede_arguments(text: str) -> bool:
    """Return whether the text is the beginning of `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`.

    The result is False for text longer than LONGEST_BEFORE.
    """
    name, bracket, rest = text.partition("[")
    if len(text) > LONGEST_BEFORE:
        return False
    if not all(character.isalnum() or character in "_-." for character in name) or not name:
        return False
    tag = bracket + rest
    if CALL_ID.startswith(tag) or ARGUMENTS.startswith(tag):
        return True
    if not tag.startswith(CALL_ID):
        return False
    call_id, bracket, rest = tag.removeprefix(CALL_ID).partition("[")
    return (not call_id or call_id.isalnum()) and ARGUMENTS.startswith(bracket + rest)


def _name_before_arguments(text: str) -> str | None:
    """Return the tool's name from the text before arguments; None if the name, a tag or the id is incomplete."""
    name, bracket, rest = text.removesuffix(ARGUMENTS).partition("[")
    is_whole = not bracket or (bracket + rest).removeprefix(CALL_ID).isalnum()
    return name if name and is_whole else None
