"""Finding a marker, such as <tool_call>, in text that arrives in chunks."""

from __future__ import annotations


class MarkerSearch:
    """Lets text through up to a marker. The whitespace before the marker belongs to it and is left out.

    What may turn out to be whitespace before the marker, or its beginning, is held back until it is known not to be.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What is certain to come before the marker, and the text after it; None for the latter until it was found."""
        self._held += text
        place = self._held.find(self._marker)
        if place >= 0:
            before, rest = self._held[:place].rstrip(), self._held[place + len(self._marker) :]
            self._held = ""
            return before, rest
        end = len(self._held[: len(self._held) - self._beginning()].rstrip())
        released, self._held = self._held[:end], self._held[end:]
        return released, None

    def flush(self) -> str:
        """What is held back, when the marker does not come any more."""
        held, self._held = self._held, ""
        return held

    def _beginning(self) -> int:
        """Length of the longest end of the text that the marker begins with."""
        for length in range(min(len(self._marker) - 1, len(self._held)), 0, -1):
            if self._marker.startswith(self._held[-length:]):
                return length
        return 0
