"""The number of drafts of a step: that which yields most tokens in a second, by measured times and acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compiled_engine.config import draft_lengths

# Weight of the newest observation: of a draft, and of a step's time.
DRAFT_WEIGHT, TIME_WEIGHT = 0.02, 0.1
# A step that takes longer than this many times the mean was held up, unless LEAST_STEPS in a row do.
HELD_UP = 2.0
# Steps of a number of drafts before it may be judged; the first may be slower than all others.
LEAST_STEPS = 3
# Another number has to be this much better, so that noise changes nothing.
MARGIN = 1.03
# Every so many steps drafts are made even if they do not pay, so that a change of the text is noticed. They are rarer
# where they would take more than this share of the time.
PROBE_EVERY, PROBE_SHARE = 64, 0.01
# So many come in a row where a head may rest: it first has to read the prompt of a request that is to have them.
PROBES_OF_HEAD = 4
# After so many steps that were not in a row their time will do: there may be no others where requests come and go.
MOST_TRIES = 32
# A number that would be this much better if its steps took no longer than those of any other is measured again, in so
# many steps, or in at most so many if requests come or go meanwhile.
PROMISING, STEPS_AGAIN, MOST_STEPS_AGAIN = 1.1, 3, 6
# Acceptance of a draft before any was verified, and how many drafts this guess counts as.
FIRST_GUESS, GUESSED_DRAFTS = 0.7, 8
# The time of a step without the head, in times of one without drafts that the head reads, until one was measured.
FIRST_GUESS_AT_REST = 0.75
# Stands for a number of drafts: none, and the head rests.
AT_REST = -1


class Drafts(NamedTuple):
    """The drafts that each request of a step may have. skips_head: no head reads the step, so that its requests have
    none any more; with 0 only."""

    number: int
    skips_head: bool = False


@dataclass
class _Times:
    """Of steps with about as many requests: number and mean seconds by number of drafts, of steps in a row. tries: the
    number of others. held_up: how many one after the other were, by number of drafts. steps, probes: since the last
    probes were over. again: the number that is measured again, in steps_again more steps at most. rounds: how often
    one was."""

    counts: dict[int, int]
    tries: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    held_up: dict[int, int] = field(default_factory=dict)
    current: int = 0
    steps: int = 0
    probes: int = 0
    again: int = 0
    steps_again: int = 0
    rounds: int = 0

    def knows(self, num_drafts: int) -> bool:
        return self.counts[num_drafts] >= LEAST_STEPS or self.tries.get(num_drafts, 0) >= MOST_TRIES

    def measure_again(self, num_drafts: int) -> None:
        """Begin with a step of this number now."""
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

    The expected tokens of a step with K drafts are 1 + a_1 + a_1 a_2 + ... up to K factors, where a_i is the share of
    drafts at position i that are right if those before were (Leviathan, Kalman and Matias, 2023, with a share for each
    position). A draft that a request might have had, and for which its tokens give none, counts as wrong. Times are
    kept by the number of requests, rounded to a power of 2.

    Another number of drafts has a price once: the host makes the rows of the step anew, and if it is slower than the
    device, the step before seems to take longer. So a time is that of a step in a row: the steps before and behind it
    have the same requests, each with as many tokens. A lone probe tells of shares alone. Where another number might be
    much better, it has a few steps in a row instead of as many probes, and if these are faster their time counts: one
    that was wrong, or is out of date, does not last.

    skips_head: drafts are those of a head, which need not read steps without drafts. A request of such a step has no
    drafts from then on, so 0 is not chosen for a step alone: where it is best, requests rest one after the other, and
    those that come later make the probes. Where it is not, the head reads each step, even one whose few requests with
    drafts do not outweigh those at rest: there will be more of them.
    """

    def __init__(self, most: int, *, skips_head: bool = False) -> None:
        self._lengths, self.skips_head = draft_lengths(most), skips_head
        self._probes = PROBES_OF_HEAD if skips_head else 1
        self._shares, self._verified = [FIRST_GUESS] * most, [GUESSED_DRAFTS] * most
        self._times: dict[int, _Times] = {}
        self._chosen = dict.fromkeys(self._lengths, 0)

    def choose(self, num_requests: int, num_drafting: int | None = None) -> Drafts:
        """Return the drafts of the next step of this many requests. num_drafting: requests that may have drafts; None
        for all."""
        times = self._of(num_requests)
        times.steps += 1
        drafts = self._next(times, num_requests, num_requests if num_drafting is None else num_drafting)
        self._chosen[drafts.number] += 1
        return drafts

    def _next(self, times: _Times, num_requests: int, num_drafting: int) -> Drafts:
        judged: _Times | None = times
        is_timed = num_drafting > 0 and 2 * num_drafting >= num_requests  # see StepInFlight
        if unknown := [length for length in self._lengths if not times.knows(length)]:
            if is_timed:
                return Drafts(unknown[-1])
            judged = self._fewer_requests(num_requests)  # drafts that do not pay there do not pay here
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
            return Drafts(self._lengths[-1])  # the longest tells of all positions
        if judged.current == 0:
            return Drafts(0, self.skips_head and not self._is_time_to_probe(times, judged))
        if not num_drafting:  # none is used, and the head need not read for them
            return Drafts(0)
        if num_drafting == num_requests:
            return Drafts(judged.current)
        share = num_drafting / max(num_requests, 1)
        return Drafts(max(self._lengths, key=lambda length: self._rate(judged.seconds, length, share)))

    def _judge(self, times: _Times) -> None:
        """Set the number that is best if all requests have drafts."""
        seconds = times.seconds | {0: self._seconds_without(times)}
        best = max(self._lengths, key=lambda length: self._rate(seconds, length))
        if self._rate(seconds, best) > MARGIN * self._rate(seconds, times.current):
            times.current = best

    def _promising(self, times: _Times) -> list[int]:
        """Return the numbers that are worth being measured again, the longest first. A head at rest has probes."""
        if self.skips_head and times.current == 0:
            return []
        lengths = self._lengths[1:] if self.skips_head else self._lengths  # 0 would let requests rest
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
        """Seconds of a step without drafts, at rest where a head may rest."""
        if not self.skips_head:
            return times.seconds[0]
        return times.seconds.get(AT_REST, FIRST_GUESS_AT_REST * times.seconds[0])

    def took(
        self, num_requests: int, num_drafts: int, seconds: float, *, head_rested: bool = False, in_a_row: bool = True
    ) -> None:
        """Take in the time of a step in which most requests had up to num_drafts drafts and that did nothing else; the
        steps before and behind it were of the same kind. in_a_row: these had the same requests, too; the time of
        another step counts only until one in a row is known."""
        self._of(num_requests).took(AT_REST if head_rested else num_drafts, seconds, in_a_row=in_a_row)

    def verified(self, num_drafts: int, num_right: int) -> None:
        """Take in the drafts of a request in a step. num_drafts: that it might have."""
        for position in range(min(num_drafts, num_right + 1)):
            self._verified[position] += 1
            weight, share = max(DRAFT_WEIGHT, 1 / self._verified[position]), self._shares[position]
            self._shares[position] = share + weight * ((position < num_right) - share)

    def _of(self, num_requests: int) -> _Times:
        return self._times.setdefault(_size(num_requests), _Times(dict.fromkeys(self._lengths, 0)))

    def _fewer_requests(self, num_requests: int) -> _Times | None:
        """Return the times of the nearest smaller number of requests for which all are known."""
        for size in sorted((size for size in self._times if size < _size(num_requests)), reverse=True):
            if all(map(self._times[size].knows, self._lengths)):
                return self._times[size]
        return None

    def _rate(self, seconds: dict[int, float], length: int, share: float = 1.0) -> float:
        """Expected tokens of a request in a second. share: of the requests that have drafts."""
        tokens, all_right = 1.0, share
        for right in self._shares[:length]:
            all_right *= right
            tokens += all_right
        return tokens / max(seconds[length], 1e-9)

    def metrics(self) -> dict[str, Any]:
        """draft_lengths: steps by number of drafts. draft_shares: a_i by position. draft_step_ms: mean time of a step,
        by number of requests, rounded up to a power of 2, and number of drafts, 0 at rest where one was measured.
        draft_length_chosen: the number of drafts that is best by these, by the same numbers of requests."""
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
    """Round a number of requests up to a power of 2."""
    return 1 << max(0, num_requests - 1).bit_length()
