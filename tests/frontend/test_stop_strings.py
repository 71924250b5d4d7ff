from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_a_minute import in_a_minute

from compiled_engine.frontend.completion import StopStrings

TEXTS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[list[str], str | None]:
    """Return the text that each piece and the flush release, and the stop string found."""
    watcher = StopStrings(stops, include_in_output=include)
    released = []
    for piece in pieces:
        text, stop = watcher.push(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, watcher.flush()], None


def first_stop(stops: Sequence[str], text: str) -> tuple[int, int, str] | None:
    """Return (end, start, stop) of the stop string that is complete first, the longest of those."""
    found = [
        (end, end - len(stop), stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)
    ]
    return min(found, default=None)


@given(pieces=st.lists(TEXTS, max_size=6), stops=STOPS, include=st.booleans())
def test_the_first_stop_string_is_found_however_the_text_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    released, stop = run(stops, pieces, include)
    expected = first_stop(stops, text)
    if expected is None:
        assert (stop, "".join(released)) == (None, text)
    else:
        end, start, name = expected
        assert (stop, "".join(released)) == (name, text[: end if include else start])


def longest_beginning(stops: Sequence[str], text: str) -> str:
    """Return the longest suffix of the text that is a proper prefix of a stop string."""
    ends = [text[start:] for start in range(len(text) + 1)]
    return next(end for end in ends if any(stop.startswith(end) and stop != end for stop in stops))


@given(pieces=st.lists(st.tuples(TEXTS, st.booleans()), max_size=6), stops=STOPS)
def test_what_a_stop_string_may_begin_with_is_held_back_and_no_more(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    watcher = StopStrings(stops)
    arrived = released = ""
    for piece, search in pieces:
        text, stop = watcher.push(piece, search=search)
        if stop is not None:
            return
        arrived, released = arrived + piece, released + text
        assert released + longest_beginning(stops, arrived) == arrived


def test_many_long_stop_strings_cost_little() -> None:
    in_a_minute("""
from compiled_engine.frontend.completion import StopStrings
watcher = StopStrings([f"{'ab' * 2000}{number:04}" for number in range(64)])
for _ in range(20):
    for _ in range(400):
        assert watcher.push("abab") == ("", None)
    assert watcher.push("x") == ("abab" * 400 + "x", None)
""")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["b", "ab"], ["xab"]) == (["x"], "ab")


def test_a_stop_string_in_text_that_is_not_searched_does_not_count() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.push("xab", search=False) == ("xab", None)
    assert watcher.push("a") == ("", None)
    assert watcher.push("b") == ("", "ab")


def test_a_stop_string_may_begin_in_text_that_was_not_searched() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.push("xa", search=False) == ("x", None)
    assert watcher.push("b") == ("", "ab")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_ended_before_the_search_stays_uncounted(include: bool) -> None:
    """Text is kept as long as the longest stop string may begin in it, so a shorter one may be there as a whole."""
    watcher = StopStrings(["ab", "wxyz"], include_in_output=include)
    assert watcher.push("xab", search=False) == ("xab", None)
    assert watcher.push("c") == ("c", None)
    assert watcher.push("ab") == ("ab" if include else "", "ab")


@pytest.mark.parametrize("count", range(1, 4))
def test_text_that_is_out_may_begin_a_stop_string(count: int) -> None:
    """However much of it came before."""
    watcher = StopStrings(["STOP", "ab"], include_in_output=True)
    assert watcher.push("one " + "STOP"[:count]) == ("one " + "STOP"[:count], None)
    assert watcher.push("STOP"[count:] + " two") == ("STOP"[count:], "STOP")


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)
