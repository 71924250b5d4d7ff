"""Chooses the number of drafts of each step that yields most tokens per second, by measured times and acceptance.

Two kinds of steps are run only to measure. A probe makes the most drafts although fewer are best, to measure
acceptance. A promising number of drafts is timed again in a few consecutive steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compiled_engine.config import draft_lengths

# Weights of the newest draft and of the newest step's time in their running means.
DRAFT_WEIGHT, TIME_WEIGHT = 0.02, 0.1
# A step that takes longer than this multiple of the mean is ignored as held up, unless LEAST_STEPS in a row are.
HELD_UP = 2.0
# Number of measured steps before a number of drafts is judged; the first step may be slower than all others.
LEAST_STEPS = 3
# Another number of drafts must be better by this factor, so that noise changes nothing.
MARGIN = 1.03
# Number of steps between probes, so that a change of the text is noticed. Probes are rarer if they would take more than
# PROBE_SHARE of the time.
PROBE_EVERY, PROBE_SHARE = 64, 0.01
# Number of consecutive probes if the head may be skipped: it must first read the prompt of a request to draft for.
PROBES_OF_HEAD = 4
# After this number of steps that were not consecutive, their time counts too: if requests come and go, there may be no
# consecutive ones.
MOST_TRIES = 32
# A number of drafts is promising if it would be better by this factor with the time of the fastest number. It is timed
# again in STEPS_AGAIN steps, or in at most MOST_STEPS_AGAIN if requests come or go meanwhile.
PROMISING, STEPS_AGAIN, MOST_STEPS_AGAIN = 1.1, 3, 6
# Acceptance of a draft before any was verified, and the number of drafts that this guess counts as.
FIRST_GUESS, GUESSED_DRAFTS = 0.7, 8
# Time of a step that skips the head, relative to one without drafts that does not, until it is measured.
FIRST_GUESS_AT_REST = 0.75
# Key in _Times for steps without drafts that skip the head.
AT_REST = -1


class Drafts(NamedTuple):
    """The drafts of a step."""

    number: int  # most drafts of each request
    skips_head: bool = False  # the step skips the head, so its requests stop drafting; only with number 0


@dataclass
class _Times:
    """Measurements of steps with about the same number of requests. Dicts are by number of drafts."""

    counts: dict[int, int]  # consecutive steps measured, see DraftLength
    tries: dict[int, int] = field(default_factory=dict)  # other steps measured
    seconds: dict[int, float] = field(default_factory=dict)  # mean time of a step
    held_up: dict[int, int] = field(default_factory=dict)  # newest steps in a row that were held up
    current: int = 0  # the best number of drafts
    steps: int = 0  # since the last probes
    probes: int = 0  # consecutive probes made so far
    again: int = 0  # number of drafts that is timed again
    steps_again: int = 0  # most steps left to time it
    rounds: int = 0  # how often a number was timed again

    def knows(self, num_drafts: int) -> bool:
        return self.counts[num_drafts] >= LEAST_STEPS or self.tries.get(num_drafts, 0) >= MOST_TRIES

    def measure_again(self, num_drafts: int) -> None:
        """Begin to time num_drafts drafts again, with the step that is being planned."""
        self.again, self.steps_again = num_drafts, MOST_STEPS_AGAIN - 1
        self.steps, self.rounds = 0, self.rounds + 1

    def took(self, num_drafts: int, seconds: float, *, in_a_row: bool) -> None:
        seen = self.counts if in_a_row else self.tries
        seen[num_drafts] = count = seen.get(num_drafts, 0) + 1
        if not in_a_row and self.counts.get(num_drafts):
            return
        before = self.seconds.get(num_drafts, seconds)
        if in_a_row and count == 1:
            self.seconds[num_drafts] = seconds
        elif count <= LEAST_STEPS:
            self.seconds[num_drafts] = min(before, seconds)
        elif self.steps_again and num_drafts == self.again:
            self.seconds[num_drafts], self.steps_again = min(before, seconds), 0
        elif seconds <= HELD_UP * before:
            self.held_up[num_drafts] = 0
            self.seconds[num_drafts] = before + TIME_WEIGHT * (seconds - before)
        else:
            self.held_up[num_drafts] = held_up = self.held_up.get(num_drafts, 0) + 1
            if held_up == LEAST_STEPS:
                self.held_up[num_drafts], self.seconds[num_drafts] = 0, seconds


class DraftLength:
    """Chooses 0 to `most` drafts for each step, see `draft_lengths`.

    The expected tokens of a step with K drafts are 1 + a_1 + a_1 a_2 + ... up to K factors, where a_i is the acceptance
    rate at position i: how often the i-th draft is right if all drafts before it are (Leviathan, Kalman and Matias,
    2023, with a rate for each position). A draft that a request had room for but that was not found counts as wrong.
    Times are kept by the number of requests, rounded up to a power of 2.

    Changing the number of drafts has a cost: the host lays out the step's rows anew, and if it is slower than the
    device, the previous step seems to take longer. So only consecutive steps are timed: the steps before and after the
    timed step have the same requests, each with the same number of tokens. The times of other steps only count until
    such a time has been measured. A lone probe only measures acceptance. A promising number is timed again in a few
    consecutive steps instead of probes. If they are faster, their time replaces the old one, so a wrong or outdated
    time does not persist.

    With `skips_head`, steps without drafts may skip the draft head. The requests of such a step stop drafting, so 0
    drafts are not chosen for a few steps only. If 0 is best, requests stop one after the other, and new requests make
    the probes. If another number is best, the head reads every step, even when few requests still draft, because more
    requests will.
    """

    def __init__(self, most: int, *, skips_head: bool = False) -> None:
        self._lengths, self.skips_head = draft_lengths(most), skips_head
        self._probes = PROBES_OF_HEAD if skips_head else 1
        self._shares, self._verified = [FIRST_GUESS] * most, [GUESSED_DRAFTS] * most
        self._times: dict[int, _Times] = {}
        self._chosen = dict.fromkeys(self._lengths, 0)

    def choose(self, num_requests: int, num_drafting: int | None = None) -> Drafts:
        """Choose the drafts of the next step, which has `num_requests` requests, and return them.

        num_drafting: requests that may have drafts; None: all.
        """
        times = self._of(num_requests)
        times.steps += 1
        drafts = self._next(times, num_requests, num_requests if num_drafting is None else num_drafting)
        self._chosen[drafts.number] += 1
        return drafts

    def _next(self, times: _Times, num_requests: int, num_drafting: int) -> Drafts:
        judged: _Times | None = times
        is_timed = num_drafting > 0 and 2 * num_drafting >= num_requests  # see TimedStep.num_drafts
        if unknown := [length for length in self._lengths if not times.knows(length)]:
            if is_timed:
                return Drafts(unknown[-1])
            judged = self._fewer_requests(num_requests)  # drafts that do not pay with fewer requests do not pay here
        if judged is None:
            return Drafts(0)
        self._judge(judged)
        if is_timed and times.steps_again:
            times.steps_again -= 1
            return Drafts(times.again)
        promising = self._promising(times) if is_timed and not unknown and times.steps >= PROBE_EVERY else []
        if promising:
            number = promising[times.rounds % len(promising)]
            if self._is_time_for(times, judged, number, STEPS_AGAIN):
                times.measure_again(number)
                return Drafts(number)
        elif num_drafting and judged.current < self._lengths[-1] and self._is_time_to_probe(times, judged):
            times.probes += 1
            if times.probes == self._probes:
                times.steps = times.probes = 0
            return Drafts(self._lengths[-1])  # the longest measures all positions
        if judged.current == 0:
            return Drafts(0, self.skips_head and not self._is_time_to_probe(times, judged))
        if not num_drafting:  # no request would use a draft
            return Drafts(0)
        if num_drafting == num_requests:
            return Drafts(judged.current)
        share = num_drafting / max(num_requests, 1)
        return Drafts(max(self._lengths, key=lambda length: self._rate(judged.seconds, length, share)))

    def _judge(self, times: _Times) -> None:
        """Set `current` to the number of drafts that is best if all requests have drafts."""
        seconds = times.seconds | {0: self._seconds_without(times)}
        best = max(self._lengths, key=lambda length: self._rate(seconds, length))
        if self._rate(seconds, best) > MARGIN * self._rate(seconds, times.current):
            times.current = best

    def _promising(self, times: _Times) -> list[int]:
        """Return the numbers of drafts to be timed again, the largest first.

        They would be better by the factor PROMISING if a step took only as long as with the fastest number. There are
        none if steps may skip the head and 0 drafts are best.
        """
        if self.skips_head and times.current == 0:
            return []
        lengths = self._lengths[1:] if self.skips_head else self._lengths  # with 0, requests would stop drafting
        least = dict.fromkeys(lengths, min(times.seconds[length] for length in self._lengths))
        needed = PROMISING * self._rate(times.seconds, times.current)
        found = [length for length in lengths if length != times.current and self._rate(least, length) > needed]
        return found[::-1]

    def _is_time_to_probe(self, times: _Times, judged: _Times) -> bool:
        return self._is_time_for(times, judged, self._lengths[-1], self._probes)

    def _is_time_for(self, times: _Times, judged: _Times, number: int, num_steps: int) -> bool:
        longer = judged.seconds[number] / max(self._seconds_without(judged), 1e-9) - 1
        return times.steps >= num_steps * max(PROBE_EVERY, longer / PROBE_SHARE)

    def _seconds_without(self, times: _Times) -> float:
        """Return the seconds of a step without drafts, which skips the head if it may."""
        if not self.skips_head:
            return times.seconds[0]
        return times.seconds.get(AT_REST, FIRST_GUESS_AT_REST * times.seconds[0])

    def took(
        self, num_requests: int, num_drafts: int, seconds: float, *, head_rested: bool = False, in_a_row: bool = True
    ) -> None:
        """Record the time of a step of decodes with at most num_drafts drafts per request.

        The steps before and after it must have had the same num_drafts. head_rested: the step skipped the draft head.
        in_a_row: the three steps had the same requests. Times without `in_a_row` are ignored once a time with it has
        been recorded.
        """
        self._of(num_requests).took(AT_REST if head_rested else num_drafts, seconds, in_a_row=in_a_row)

    def verified(self, num_drafts: int, num_right: int) -> None:
        """Record the drafts of a request in a step. The first `num_right` drafts were right.

        `num_drafts` is the number that the request had room for.
        """
        for position in range(min(num_drafts, num_right + 1)):
            self._verified[position] += 1
            weight, share = max(DRAFT_WEIGHT, 1 / self._verified[position]), self._shares[position]
            self._shares[position] = share + weight * ((position < num_right) - share)

    def _of(self, num_requests: int) -> _Times:
        return self._times.setdefault(_size(num_requests), _Times(dict.fromkeys(self._lengths, 0)))

    def _fewer_requests(self, num_requests: int) -> _Times | None:
        """Return the times for the largest smaller number of requests that has known times, or None.

        The times must be known for every number of drafts.
        """
        for size in sorted((size for size in self._times if size < _size(num_requests)), reverse=True):
            if all(map(self._times[size].knows, self._lengths)):
                return self._times[size]
        return None

    def _rate(self, seconds: dict[int, float], length: int, share: float = 1.0) -> float:
        """Return the expected tokens per request and second of steps with `length` drafts.

        seconds: time of a step by number of drafts. share: fraction of requests that have drafts.
        """
        tokens, all_right = 1.0, share
        for right in self._shares[:length]:
            all_right *= right
            tokens += all_right
        return tokens / max(seconds[length], 1e-9)

    def metrics(self) -> dict[str, Any]:
        """Return counts of steps, acceptance rates, mean times of steps and the best numbers of drafts.

        draft_lengths: counts of steps by number of drafts. draft_shares: the acceptance rates a_i. draft_step_ms: mean
        time of a step, by number of requests (rounded up to a power of 2) and number of drafts; for 0 drafts, of a step
        that skips the head if one was measured. draft_length_chosen: the best number of drafts, by number of requests.
        """
        return {
            "draft_lengths": {str(length): count for length, count in self._chosen.items()},
            "draft_shares": [round(share, 3) for share in self._shares],
            "draft_step_ms": {
                str(size): {
                    str(length): round(1e3 * times.seconds.get(AT_REST, seconds) if length == 0 else 1e3 * seconds, 3)
                    for length, seconds in sorted(times.seconds.items())
                    if length != AT_REST
                }
                for size, times in sorted(self._times.items())
            },
            "draft_length_chosen": {str(size): times.current for size, times in sorted(self._times.items())},
        }


def _size(num_requests: int) -> int:
    """Return a number of requests rounded up to a power of 2."""
    return 1 << max(0, num_requests - 1).bit_length()
