"""Find markers, such as <tool_call>, and the ends of JSON values in text that arrives in chunks."""

from __future__ import annotations

from collections.abc import Collection


class JsonValue:
    """Finds the end of a JSON string, object or array, which is read from its first character on.

    Brackets are counted and strings skipped; validity is not checked. Other values are not supported, since they do not
    mark their own end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def ends_with(self, character: str) -> bool:
        """Read the next character. Return whether it completes the value."""
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
    """Splits text at markers. The whitespace before a marker belongs to the marker.

    Text is held back while it may be whitespace before a marker, or a marker's beginning.
    """

    def __init__(self, *markers: str, lead: str = "") -> None:
        """`lead` belongs to a marker that follows it directly; elsewhere it is ordinary text.

        Without `markers`, the text is not split.
        """
        self._markers = markers
        self._lead = lead
        self._held = ""
        self.found = ""  # the last marker found, as written, with its lead and the whitespace before it

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the text that certainly precedes the next marker, and the text after that marker.

        The second is None until the marker is found.
        """
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
        """Return the held-back text. Called when no marker can follow."""
        held, self._held = self._held, ""
        return held

    def _without_lead(self, text: str) -> str:
        text = text.rstrip()
        return text.removesuffix(self._lead).rstrip() if self._lead else text


def first_of(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """Return the position and text of the marker that comes first, or None."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def beginning_of(text: str, markers: Collection[str]) -> int:
    """Return the length of the longest suffix that may be the beginning of a marker."""
    for length in range(min(max(map(len, markers)) - 1, len(text)), 0, -1):
        if any(len(marker) > length and marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
