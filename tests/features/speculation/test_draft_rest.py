"""If a head does not pay, requests stop drafting one after the other, and later ones find out when it pays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from compiled_engine.features.speculation.draft_length import DraftLength

# Seconds of a step at rest, of one that the head reads, and of one with drafts, the least and for each of them.
AT_REST, READ, DRAFTED, DRAFT = 1.0, 1.25, 1.3, 0.2
MOST = 3


@dataclass
class Serving:
    """Runs `places` requests at a time: when one ends, another comes. `share` of the drafts are right."""

    places: int
    output_len: int
    share: float = 0.0
    length: DraftLength = field(default_factory=lambda: DraftLength(MOST, skips_head=True))
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.left = [self.draw.randint(1, self.output_len) for _ in range(self.places)]
        self.rests = [False] * self.places
        self.numbers: list[int] = []

    def run(self, num_steps: int) -> float:
        """Return seconds for each token of a request, in times of those of an engine without drafts."""
        seconds, tokens = 0.0, 0
        for _ in range(num_steps):
            drafting = [place for place in range(self.places) if not self.rests[place]]
            number, skips_head = self.length.choose(self.places, len(drafting))
            assert not (skips_head and number)
            self.numbers.append(number)
            skips_head |= not drafting
            if skips_head:
                took = AT_REST
                self.rests = [True] * self.places
            else:
                took = DRAFTED + DRAFT * number if number else READ
            if number == 0 or 2 * len(drafting) >= self.places:
                self.length.took(self.places, number, took * self.draw.uniform(0.98, 1.05), head_rested=skips_head)
            for place in range(self.places):
                right = 0
                if number and place in drafting:
                    right = next((i for i in range(number) if self.draw.random() >= self.share), number)
                    self.length.verified(number, right)
                self._take(place, 1 + right)
                tokens += 1 + right
            seconds += took
        return seconds * self.places / tokens

    def _take(self, place: int, count: int) -> None:
        self.left[place] -= count
        if self.left[place] <= 0:
            self.left[place], self.rests[place] = self.output_len, False


@pytest.mark.parametrize("places", [1, 8, 64])
def test_a_head_that_is_never_right_costs_next_to_nothing(places: int) -> None:
    serving = Serving(places, output_len=64)
    serving.run(600)
    assert serving.run(6400) <= 1.02
    assert MOST in serving.numbers[600:]


@pytest.mark.parametrize("places", [1, 8, 64])
def test_later_requests_find_out_that_it_is_right_again(places: int) -> None:
    serving = Serving(places, output_len=64)
    serving.run(2000)
    serving.share = 0.9
    serving.run(8000)
    assert not any(serving.rests)
    assert serving.run(640) < 0.6
    assert serving.numbers[-640:].count(MOST) >= 630
    serving.share = 0.0
    serving.run(2000)
    assert serving.run(6400) <= 1.02


def test_a_long_request_at_rest_costs_nothing_at_all() -> None:
    serving = Serving(1, output_len=10**9)
    serving.run(300)
    assert serving.rests == [True]
    assert serving.run(3000) == AT_REST
    assert set(serving.numbers[-3000:]) == {0}


def test_a_new_request_beside_many_at_rest_makes_few_probes() -> None:
    serving = Serving(64, output_len=10**9)
    serving.run(600)
    assert all(serving.rests)
    chosen = [serving.length.choose(64, 1) for _ in range(300)]
    assert chosen == [(MOST, False)] * 4 + [(0, True)] * 296


def test_what_rests_in_few_requests_rests_in_more() -> None:
    """If one of 50 requests may have drafts, nothing is learnt of the time of steps in which all have drafts."""
    serving = Serving(8, output_len=64)
    serving.run(600)
    assert serving.length.choose(50, 1) == (0, True)
    fresh = DraftLength(MOST, skips_head=True)
    assert fresh.choose(50, 1) == (0, False)
    assert fresh.choose(50, 25) == (MOST, False)


def test_a_head_rests_only_if_drafts_may_be_worth_less_than_a_step_at_rest_saves() -> None:
    """Until a step at rest was measured it may be a quarter shorter than one that the head reads."""
    for share, rests in ((0.1, True), (0.9, False)):
        serving = Serving(8, output_len=10**9, share=share)
        serving.run(200)
        assert all(serving.rests) == rests


def test_drafts_of_other_sources_never_rest() -> None:
    length = DraftLength(MOST)
    for _ in range(500):
        number, skips_head = length.choose(4)
        assert not skips_head
        length.took(4, number, 1.0 + number)
        if number:
            length.verified(number, 0)
