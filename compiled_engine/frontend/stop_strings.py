"""Stop strings: found across token borders, and never let out in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches text that arrives in pieces for the first of several stop strings.

    The first is the one that is complete first; of two that end together, the longer. So the result does not
    depend on how the text is cut into pieces. Without `include_in_output`, text that may be the beginning of
    a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
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
            return self._release(len(self._text) - self._possible_beginning()), None
        start, stop = match
        return self._release(start + len(stop) if self._include else start), stop

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        return self._release(len(self._text))

    def _find(self) -> tuple[int, str] | None:
        """Where the first stop string begins, and which it is, among those that end after `_searched`."""
        matches = []
        for stop in self._stops:
            start = self._text.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_beginning(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        if self._include:
            return 0
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            ending = self._text[-length:]
            if any(len(stop) > length and stop.startswith(ending) for stop in self._stops):
                return length
        return 0

    def _release(self, end: int) -> str:
        """Let the text out up to `end`, and forget what no stop string can begin in any more."""
        released = self._text[self._released : end]
        forgotten = max(0, min(end, len(self._text) - self._longest + 1))
        self._text = self._text[forgotten:]
        self._released = end - forgotten
        self._searched -= forgotten
        return released
