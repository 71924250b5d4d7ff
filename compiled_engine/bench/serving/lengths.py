"""Distributions of prompt and output lengths, in tokens, as they are written on a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FORMS = {
    "uniform": "uniform:LEAST:MOST",
    "normal": "normal:MEAN:DEVIATION:LEAST:MOST",
    "lognormal": "lognormal:MEDIAN:SIGMA:LEAST:MOST",
}
ALLOWED = f"a number of tokens, or {', '.join(FORMS.values())}"


@dataclass(frozen=True)
class Lengths:
    """kind: fixed, or a key of FORMS. centre, spread: mean and deviation of a normal, median and sigma (of the natural
    logarithm) of a lognormal distribution. What falls outside least to most becomes the nearer of the two.
    """

    text: str
    kind: str
    least: int
    most: int
    centre: float = 0.0
    spread: float = 0.0

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        if self.kind == "uniform":
            drawn = generator.integers(self.least, self.most, count, endpoint=True).astype(float)
        elif self.kind == "normal":
            drawn = generator.normal(self.centre, self.spread, count)
        elif self.kind == "lognormal":
            drawn = generator.lognormal(math.log(self.centre), self.spread, count)
        else:
            drawn = np.full(count, self.least, float)
        return [int(length) for length in np.clip(np.rint(drawn), self.least, self.most)]


def parse_lengths(name: str, text: str) -> Lengths:
    """The distribution that `text` describes. Raises ValueError naming the option and what is allowed."""
    kind, _, rest = text.partition(":")
    error = ValueError(f"{name} is {text!r}; allowed: {ALLOWED}, with LEAST from 1 and at most MOST")
    try:
        if kind not in FORMS:
            return Lengths(text, "fixed", *_range(int(text), int(text)))
        numbers = rest.split(":")
        if len(numbers) != FORMS[kind].count(":"):
            raise error
        *shape, least, most = numbers
        return Lengths(text, kind, *_range(int(least), int(most)), *_shape(kind, [float(number) for number in shape]))
    except ValueError:
        raise error from None


def _range(least: int, most: int) -> tuple[int, int]:
    if not 1 <= least <= most:
        raise ValueError
    return least, most


def _shape(kind: str, numbers: Sequence[float]) -> Sequence[float]:
    if numbers and (
        not all(map(math.isfinite, numbers)) or numbers[1] < 0 or (kind == "lognormal" and numbers[0] <= 0)
    ):
        raise ValueError
    return numbers
