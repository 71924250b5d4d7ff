"""When requests are due: a gamma process of a steady rate, or a rate that ramps from one value to another.

Burstiness is the shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, more is
even. The gaps of a steady rate are scaled so that all requests together have exactly this rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALLOWED_RATE = "a number of requests per second above 0, inf, or a share such as 70% of what an earlier inf completed"
ALLOWED_RAMP = "START:END in requests per second, or exponential:START:END"


@dataclass(frozen=True)
class Rate:
    """Requests per second, inf for all at once; if `is_share`, the share of the rate that a run at inf completed."""

    value: float
    is_share: bool = False

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


@dataclass(frozen=True)
class Ramp:
    """From `start` to `end` requests per second: by equal steps from request to request, or by equal factors."""

    start: float
    end: float
    is_exponential: bool

    def rate_at(self, place: float) -> float:
        """place: 0 for the first request, 1 for the last."""
        if self.is_exponential:
            return self.start * (self.end / self.start) ** place
        return self.start + (self.end - self.start) * place

    def __str__(self) -> str:
        return f"{'exponential:' * self.is_exponential}{self.start:g}:{self.end:g}"


def parse_rates(texts: Sequence[str]) -> list[Rate]:
    """Rates, each alone or several with commas between. Raises ValueError naming what is allowed."""
    rates = [_parse_rate(part.strip()) for text in texts for part in text.split(",")]
    for place, rate in enumerate(rates):
        if rate.is_share and not any(math.isinf(earlier.value) for earlier in rates[:place]):
            raise ValueError(f"request_rate is {rate}, a share; allowed: after a rate of inf, such as inf,{rate}")
    return rates


def parse_ramp(text: str) -> Ramp:
    """Raises ValueError naming what is allowed."""
    kind, *numbers = text.split(":") if text.startswith("exponential:") else ("linear", *text.split(":"))
    try:
        start, end = (_positive(number) for number in numbers)
    except ValueError:
        raise ValueError(f"ramp is {text!r}; allowed: {ALLOWED_RAMP}") from None
    return Ramp(start, end, kind == "exponential")


def arrival_times(
    count: int, rate: float, burstiness: float, ramp: Ramp | None, generator: np.random.Generator
) -> list[float]:
    """Seconds from the start at which each request is due, rising; the first is due at once.

    A ramp takes the place of the rate.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    places = np.arange(1, count) / max(count - 1, 1)
    rates = np.array([rate if ramp is None else ramp.rate_at(place) for place in places])
    gaps = generator.gamma(burstiness, 1 / burstiness, count - 1) / rates
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if ramp is None and times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(time) for time in times]


def _parse_rate(text: str) -> Rate:
    try:
        is_share = text.endswith("%")
        value = _positive(text.removesuffix("%"), finite=is_share)
    except ValueError:
        raise ValueError(f"request_rate is {text!r}; allowed: {ALLOWED_RATE}") from None
    return Rate(value / 100 if is_share else value, is_share)


def _positive(text: str, *, finite: bool = True) -> float:
    value = float(text)
    if not value > 0 or (finite and math.isinf(value)):
        raise ValueError
    return value
