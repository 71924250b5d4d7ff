"""What somebody may have meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Misspellings, a missing or an exchanged word stay above this; names that merely share letters fall below.
SIMILARITY = 0.75
# So many times longer than a known name, another one stays below it whatever its letters.
TOO_LONG = 2 / SIMILARITY - 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like `name`, one of the same letters first; None if none is close."""
    name = name.lower()
    by_lower_case = {other.lower(): other for other in known}
    if len(name) > TOO_LONG * max(map(len, by_lower_case), default=0):
        return None
    exchanged = [other for other in by_lower_case if sorted(other) == sorted(name)]
    found = exchanged or difflib.get_close_matches(name, by_lower_case, n=1, cutoff=SIMILARITY)
    return by_lower_case[found[0]] if found else None


def unknown_name_message(what: str, name: str, known: Iterable[str]) -> str:
    """Such as "SamplingParams has no field 'temprature'; did you mean 'temperature'?". `what`: all before the name."""
    near = nearest(name, known)
    return f"{what} {name!r}" + (f"; did you mean {near!r}?" if near is not None else "")
