"""A sequence with its repetitions folded: a model's steps are the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Repeat(Generic[T]):
    """`items` in this order, `count` times."""

    items: tuple[T, ...]
    count: int


def fold(items: Sequence[T], longest: int = 6) -> list[Repeat[T]]:
    """The sequence as repetitions of at most `longest` items; greedy from the start, what covers most first."""
    folded: list[Repeat[T]] = []
    start = 0
    while start < len(items):
        best = Repeat(tuple(items[start : start + 1]), 1)
        for period in range(1, longest + 1):
            unit = tuple(items[start : start + period])
            count = 1
            while tuple(items[start + count * period : start + (count + 1) * period]) == unit:
                count += 1
            if count > 1 and count * period > best.count * len(best.items):
                best = Repeat(unit, count)
        folded.append(best)
        start += best.count * len(best.items)
    return folded
