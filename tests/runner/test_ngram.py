"""Drafts from a request's own tokens, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.runner.ngram import ngram_drafts


def drafts(token_ids: list[int], longest: int, shortest: int, count: int) -> list[int]:
    found: list[int] = ngram_drafts(np.array(token_ids, np.int32), longest, shortest, count).tolist()
    return found


def by_definition(token_ids: list[int], longest: int, shortest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == token_ids[-length:]:
                known = token_ids[start + length :]
                return [known[i % len(known)] for i in range(count)]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 5), st.integers(1, 9))
def test_what_followed_the_longest_newest_match(token_ids: list[int], a: int, b: int, count: int) -> None:
    longest, shortest = max(a, b), min(a, b)
    assert drafts(token_ids, longest, shortest, count) == by_definition(token_ids, longest, shortest, count)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),  # a longer match counts more than a newer one
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        ([5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2], [8, 5, 1]),  # more than two tokens are not compared
        ([7, 7], [7, 7, 7]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_examples(token_ids: list[int], expected: list[int]) -> None:
    assert drafts(token_ids, 2, 1, 3) == expected
