"""What somebody may have meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Misspellings, a missing or an exchanged word stay above this; names that merely share letters fall below.
SIMILARITY = 0.75


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like `name`, one of the same letters first; None if none is close."""
    by_lower_case = {other.lower(): other for other in known}
    exchanged = [other for other in by_lower_case if sorted(other) == sorted(name.lower())]
    found = exchanged or difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=SIMILARITY)
    return by_lower_case[found[0]] if found else None


def unknown_name_message(what: str, name: str, known: Iterable[str]) -> str:
    """Such as "SamplingParams has no field 'temprature'; did you mean 'temperature'?". `what`: all before the name."""
    near = nearest(name, known)
    return f"{what} {name!r}" + (f"; did you mean {near!r}?" if near is not None else "")
