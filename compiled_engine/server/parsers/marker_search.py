"""Finding a marker, such as <tool_call>, in text that arrives in chunks."""

from __future__ import annotations

from collections.abc import Collection

# Where a JSON value ends in text that arrives character by character.


class JsonValue:
    """Follows a string, an object or an array from its first character on; other values have no end of their own.

    Brackets are counted and strings are skipped; whether the text between them is JSON is not checked.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def ends_with(self, character: str) -> bool:
        """Read the next character; return whether it completes the value."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class MarkerSearch:
    """Lets text through up to a marker, the first of several. The whitespace before it belongs to it and is left out.

    What may turn out to be whitespace before the marker, or its beginning, is held back until it is known not to be.
    lead: a text that belongs to the marker where it precedes it, and is any other text elsewhere. found: the marker
    that was found last, as it was written, with its lead and the whitespace before it.
    """

    def __init__(self, *markers: str, lead: str = "") -> None:
        """markers: without any, all text is let through."""
        self._markers = markers
        self._lead = lead
        self._held = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that certainly precedes the marker, and the text after it; None for the latter until it is
        found."""
        self._held += text
        if found := first_of(self._held, self._markers):
            place, marker = found
            before, rest = self._without_lead(self._held[:place]), self._held[place + len(marker) :]
            self.found = self._held[len(before) : len(self._held) - len(rest)]
            self._held = ""
            return before, rest
        beginning = beginning_of(self._held, (*self._markers, self._lead))
        end = len(self._without_lead(self._held[: len(self._held) - beginning]))
        released, self._held = self._held[:end], self._held[end:]
        return released, None

    def flush(self) -> str:
        """Return the text that was held back, when the marker can no longer follow."""
        held, self._held = self._held, ""
        return held

    def _without_lead(self, text: str) -> str:
        text = text.rstrip()
        return text.removesuffix(self._lead).rstrip() if self._lead else text


def first_of(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """Return the place of the marker that comes first, and the marker; None if there is none."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def beginning_of(text: str, markers: Collection[str]) -> int:
    """Return the length of the longest end of the text with which one of the markers begins."""
    for length in range(min(max(map(len, markers)) - 1, len(text)), 0, -1):
        if any(len(marker) > length and marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
