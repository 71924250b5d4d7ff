"""The number of drafts of a step: that which yields most tokens in a second, by measured times and acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from compiled_engine.config import draft_lengths

# Weight of the newest observation: of a draft, and of a step's time.
DRAFT_WEIGHT, TIME_WEIGHT = 0.02, 0.1
# A step that takes longer than this many times the mean was held up, unless LEAST_STEPS in a row do.
HELD_UP = 2.0
# Steps of a number of drafts before it may be judged; the first may be slower than all others.
LEAST_STEPS = 3
# Another number has to be this much better, so that noise changes nothing.
MARGIN = 1.03
# Every so many steps drafts are made even if they do not pay, so that a change of the text is noticed.
PROBE_EVERY = 64
# Acceptance of a draft before any was verified, and how many drafts this guess counts as.
FIRST_GUESS, GUESSED_DRAFTS = 0.7, 8


@dataclass
class _Times:
    """Of steps with about as many requests: number and mean seconds by number of drafts. held_up: how many of them in
    a row were, by number of drafts."""

    counts: dict[int, int]
    seconds: dict[int, float] = field(default_factory=dict)
    held_up: dict[int, int] = field(default_factory=dict)
    current: int = 0
    steps: int = 0

    def took(self, num_drafts: int, seconds: float) -> None:
        self.counts[num_drafts] += 1
        before = self.seconds.get(num_drafts)
        if before is None or self.counts[num_drafts] <= LEAST_STEPS:
            self.seconds[num_drafts] = seconds if before is None else min(before, seconds)
        elif seconds <= HELD_UP * before:
            self.held_up[num_drafts] = 0
            self.seconds[num_drafts] = before + TIME_WEIGHT * (seconds - before)
        else:
            self.held_up[num_drafts] = in_a_row = self.held_up.get(num_drafts, 0) + 1
            if in_a_row == LEAST_STEPS:
                self.held_up[num_drafts], self.seconds[num_drafts] = 0, seconds


class DraftLength:
    """Chooses 0 to `most` drafts for each step, see `draft_lengths`.

    The expected tokens of a step with K drafts are 1 + a_1 + a_1 a_2 + ... up to K factors, where a_i is the share of
    drafts at position i that are right if those before were (Leviathan, Kalman and Matias, 2023, with a share for each
    position). Times are kept by the number of requests, rounded to a power of 2.
    """

    def __init__(self, most: int) -> None:
        self._lengths = draft_lengths(most)
        self._shares, self._verified = [FIRST_GUESS] * most, [GUESSED_DRAFTS] * most
        self._times: dict[int, _Times] = {}
        self._chosen = dict.fromkeys(self._lengths, 0)

    def choose(self, num_requests: int) -> int:
        """Return the number of drafts for the next step of this many requests."""
        times = self._of(num_requests)
        times.steps += 1
        length = self._next(times)
        self._chosen[length] += 1
        return length

    def _next(self, times: _Times) -> int:
        if unknown := [length for length in self._lengths if times.counts[length] < LEAST_STEPS]:
            return unknown[-1]
        best = max(self._lengths, key=lambda length: self._rate(times, length))
        if self._rate(times, best) > MARGIN * self._rate(times, times.current):
            times.current = best
        # The longest tells of all positions.
        return self._lengths[-1] if times.steps % PROBE_EVERY == 0 else times.current

    def took(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Take in the time of a step in which every request had up to num_drafts drafts and nothing else."""
        self._of(num_requests).took(num_drafts, seconds)

    def verified(self, num_drafts: int, num_right: int) -> None:
        """Take in the drafts of a request in a step."""
        for position in range(min(num_drafts, num_right + 1)):
            self._verified[position] += 1
            weight, share = max(DRAFT_WEIGHT, 1 / self._verified[position]), self._shares[position]
            self._shares[position] = share + weight * ((position < num_right) - share)

    def _of(self, num_requests: int) -> _Times:
        size = 1 << max(0, num_requests - 1).bit_length()
        return self._times.setdefault(size, _Times(dict.fromkeys(self._lengths, 0)))

    def _rate(self, times: _Times, length: int) -> float:
        """Expected tokens a second."""
        tokens, all_right = 1.0, 1.0
        for share in self._shares[:length]:
            all_right *= share
            tokens += all_right
        return tokens / max(times.seconds[length], 1e-9)

    def metrics(self) -> dict[str, Any]:
        """draft_lengths: steps by number of drafts. draft_shares: a_i by position. draft_step_ms: mean time of a step,
        by number of requests, rounded up to a power of 2, and number of drafts. draft_length_chosen: the number of
        drafts that is best by these, by the same numbers of requests."""
        return {
            "draft_lengths": {str(length): count for length, count in self._chosen.items()},
            "draft_shares": [round(share, 3) for share in self._shares],
            "draft_step_ms": {
                str(size): {str(length): round(1e3 * seconds, 3) for length, seconds in sorted(times.seconds.items())}
                for size, times in sorted(self._times.items())
            },
            "draft_length_chosen": {str(size): times.current for size, times in sorted(self._times.items())},
        }
