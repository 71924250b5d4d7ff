"""Stop strings: found across token borders, and never let out in part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class StopStrings:
    """Finds the first of several stop strings in text that arrives in pieces.

    The first is the string that is complete first; of two that end together, the longer. So the result does not
    depend on how the text is cut into pieces. Without `include_in_output`, text that may be the beginning of a stop
    string is held back until it is not.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops))
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._text = ""  # a tail of what arrived: all that is held back, and all that a stop string may begin in
        self._released = 0  # how much of `_text` is out
        self._searched = 0  # no stop string that counts ends at or before this place in `_text`

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Add text; give what is released by it, and the stop string that it completed, if any.

        With `search` False no stop string that this text completes counts. After a match nothing may be
        pushed.
        """
        if not self._stops:
            return text, None
        self._text += text
        match = self._find() if search else None
        self._searched = len(self._text)
        if match is None:
            return self._release(self._possible_beginning()), None
        start, stop = match
        return self._release(start + len(stop) if self._include else start), stop

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        return self._release(len(self._text))

    def _find(self) -> tuple[int, str] | None:
        """The first stop string that ends after `_searched`, and its start."""
        for end in range(self._searched + 1, len(self._text) + 1):
            if self._text.endswith(self._stops, 0, end):
                stop = max((stop for stop in self._stops if self._text.endswith(stop, 0, end)), key=len)
                return end - len(stop), stop
        return None

    def _possible_beginning(self) -> int:
        """Start of the longest suffix of the text that is a prefix of a stop string."""
        if self._include:
            return len(self._text)
        # Search only the held-back text: more text cannot make a prefix of earlier text. So each place is passed once.
        for start in range(max(self._released, len(self._text) - self._longest + 1), len(self._text)):
            ending = self._text[start:]
            place = bisect_right(self._stops, ending)  # sorted: the first of the longer strings that begin with it
            if place < len(self._stops) and self._stops[place].startswith(ending):
                return start
        return len(self._text)

    def _release(self, end: int) -> str:
        """Let the text out up to `end`, and forget what no stop string can begin in any more."""
        released = self._text[self._released : end]
        forgotten = max(0, min(end, len(self._text) - self._longest + 1))
        self._text = self._text[forgotten:]
        self._released = end - forgotten
        self._searched -= forgotten
        return released
