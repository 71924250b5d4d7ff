"""Log-probabilities as they leave the sampler: plain values of one position."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the top k, most likely first.

    `rank` is the chosen token's rank in the vocabulary, 1 for the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
