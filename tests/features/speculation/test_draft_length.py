"""The number of drafts of a step follows acceptance and cost."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.speculation.draft_length import LEAST_STEPS, PROBE_EVERY, DraftLength, Drafts
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.sampling.params import SamplingParams


def run(
    length: DraftLength, share: float, seconds: dict[int, float], num_steps: int, num_requests: int = 3
) -> list[int]:
    """The numbers chosen in steps of requests of which each draft is right with this share. seconds: of a step by its
    number of drafts, with noise."""
    chosen, draw = [], random.Random(0)
    for _ in range(num_steps):
        count = length.choose(num_requests).number
        chosen.append(count)
        for _ in range(num_requests):
            right = next((i for i in range(count) if draw.random() > share), count)
            if count:
                length.verified(count, right)
        length.took(num_requests, count, seconds[count] * draw.uniform(0.95, 1.15))
    return chosen


# A draft costs a tenth of a step, or four of them more than two steps.
CHEAP = {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3, 4: 1.4, 6: 1.6}
DEAR = {0: 1.0, 1: 1.9, 2: 2.8, 3: 3.7, 4: 4.6, 6: 6.4}


@pytest.mark.parametrize(
    ("share", "seconds", "best"),
    [(0.0, CHEAP, {0}), (0.95, CHEAP, {6}), (0.6, CHEAP, {3}), (0.6, DEAR, {0}), (0.9, DEAR, {0, 1})],
)
def test_the_best_number_is_found(share: float, seconds: dict[int, float], best: set[int]) -> None:
    length = DraftLength(6)
    run(length, share, seconds, 400)
    chosen = run(length, share, seconds, 640)
    assert sum(count in best for count in chosen) >= 640 - 640 // PROBE_EVERY - (6 in best)


def test_drafts_that_never_are_right_cost_a_probe_at_times() -> None:
    length = DraftLength(6)
    first = run(length, 0.0, CHEAP, 4 * LEAST_STEPS)
    assert sorted(set(first)) == [0, 1, 3, 6]
    run(length, 0.0, CHEAP, 300)
    chosen = run(length, 0.0, CHEAP, 6400)
    cost = sum(CHEAP[count] for count in chosen) / len(chosen)
    assert cost <= 1.02
    assert 75 <= chosen.count(6) <= 100  # one step in 64, but for a few in which another number is measured again


def test_it_follows_the_text() -> None:
    """From drafts that are never right to some that nearly always are, and back."""
    length = DraftLength(4)
    run(length, 0.0, CHEAP, 500)
    run(length, 0.95, CHEAP, 2000)
    assert run(length, 0.95, CHEAP, 200).count(4) == 200
    run(length, 0.0, CHEAP, 300)
    assert run(length, 0.0, CHEAP, 200).count(0) >= 195


def test_numbers_of_requests_have_times_of_their_own() -> None:
    length = DraftLength(4)
    run(length, 0.8, CHEAP, 300, num_requests=1)
    run(length, 0.8, DEAR, 300, num_requests=40)
    assert run(length, 0.8, CHEAP, 60, num_requests=1).count(4) >= 59
    assert run(length, 0.8, DEAR, 60, num_requests=33).count(0) >= 59
    metrics = length.metrics()
    assert metrics["draft_step_ms"].keys() == {"1", "64"}
    assert sum(metrics["draft_lengths"].values()) == 720
    assert metrics["draft_shares"][0] == pytest.approx(0.8, abs=0.15)


def test_one_draft() -> None:
    length = DraftLength(1)
    assert set(run(length, 0.9, {0: 1.0, 1: 1.1}, 100)) == {0, 1}


def test_the_first_drafts_tell_most() -> None:
    """Thirty drafts that are wrong outweigh the guess before them."""
    length = DraftLength(4)
    run(length, 0.0, CHEAP, 4 * LEAST_STEPS)
    run(length, 0.0, CHEAP, 10)
    assert length.metrics()["draft_shares"][0] < 0.15


def test_drafts_of_few_requests_do_not_hold_up_the_others() -> None:
    """A draft costs half a step."""
    length = DraftLength(4)
    for number in (0, 1, 2, 4):
        for _ in range(LEAST_STEPS):
            length.took(8, number, 1 + number / 2)
    for _ in range(200):
        length.verified(4, 4)
    assert [length.choose(8, num_drafting).number for num_drafting in (8, 6, 1)] == [4, 4, 0]


@pytest.mark.parametrize("skips_head", [False, True])
def test_a_step_whose_requests_have_no_drafts_makes_none(skips_head: bool) -> None:
    """Not even if those without drafts were held up, so that steps with drafts seem to be faster."""
    length = DraftLength(4, skips_head=skips_head)
    for number in (0, 1, 2, 4):
        for _ in range(LEAST_STEPS):
            length.took(8, number, 1.0 if number else 3.0)
    assert length.choose(8, 8).number
    assert length.choose(8, 0) == (0, False)


def test_a_draft_that_does_not_exist_counts_as_wrong() -> None:
    """N-grams have drafts now and then, all right: their rows cost as much in each step."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=900, policy="fcfs"),
        CacheConfig(16, None, 0.9, True),
        num_blocks=64,
        vocab_size=11,
        max_new_tokens_per_step=4,
        features=[DraftPlan(3, 1, 1, length=DraftLength(3))],
    )
    scheduler.add(EngineRequest("a", (1, 2), SamplingParams(max_tokens=800, ignore_eos=True)))
    for number in range(400):
        step = scheduler.schedule()
        assert step is not None
        has_drafts = number % 10 == 9 and step.counts == [4]
        count, num_drafts = (4, 3) if has_drafts else (1, 0)
        scheduler.update(
            step, RunnerOutput([3] * count, lengths=[count], columns={VERIFIED_DRAFTS: [(num_drafts, count - 1)]})
        )
    metrics = scheduler.metrics()
    assert metrics["draft_shares"][0] < 0.4
    assert metrics["accepted_tokens"] == metrics["draft_tokens"]


LENGTHS = (0, 1, 3, 6)  # between which a step of up to 6 drafts chooses


def measured(
    seconds: dict[int, float],
    right: Iterable[int] = (),
    *,
    num_requests: int = 4,
    skips_head: bool = False,
    into: DraftLength | None = None,
) -> DraftLength:
    """Every number of drafts has taken its seconds three times; of each six drafts so many were right."""
    length = into or DraftLength(6, skips_head=skips_head)
    for number in LENGTHS:
        for _ in range(3):
            length.took(num_requests, number, seconds[number])
    for count in right:
        length.verified(6, count)
    return length


def step_ms(length: DraftLength, num_requests: int = 4) -> dict[str, float]:
    found: dict[str, float] = length.metrics()["draft_step_ms"][str(num_requests)]
    return found


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [
        ([4.0, 2.0, 3.0], 2.0),  # the least of the first three
        ([2.0, 2.0, 2.0, 1.0], 1.9),  # then a tenth of the difference
        ([1.0, 1.0, 1.0, 5.0, 6.0, 1.0, 7.0, 8.0], 1.0),  # held up
        ([1.0, 1.0, 1.0, 5.0, 6.0, 7.0], 7.0),  # three in a row are the new time
    ],
    ids=str,
)
def test_the_time_of_a_step(seconds: list[float], mean: float) -> None:
    length = DraftLength(6)
    for each in seconds:
        length.took(4, 3, each)
    assert step_ms(length) == {"3": pytest.approx(1e3 * mean)}


def test_times_of_steps_in_a_row_replace_others() -> None:
    """If there are no such steps, because requests come and go, others count after a while."""
    length = DraftLength(1)
    chosen = []
    for _ in range(64):
        chosen.append(length.choose(4).number)
        length.took(4, chosen[-1], 1.0 + chosen[-1], in_a_row=False)
    assert chosen == [1] * 32 + [0] * 32
    assert step_ms(length) == {"0": 1e3, "1": 2e3}
    for number in (0, 1):
        length.took(4, number, 3.0)
        length.took(4, number, 0.5, in_a_row=False)
    assert step_ms(length) == {"0": 3e3, "1": 3e3}


def test_the_time_without_drafts_is_that_at_rest_once_it_is_known() -> None:
    length = DraftLength(6, skips_head=True)
    for number in (6, 0, 3):
        length.took(4, number, 1.0 + number)
    assert step_ms(length) == {"0": 1e3, "3": 4e3, "6": 7e3}
    length.took(4, 0, 0.25, head_rested=True)
    assert list(step_ms(length).items()) == [("0", 250.0), ("3", 4e3), ("6", 7e3)]


@given(drafts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=120))
def test_the_share_of_a_position_is_that_of_drafts_behind_right_ones(drafts: list[tuple[int, int]]) -> None:
    """The share begins like that of eight drafts, 70 % of them right; from fifty drafts on, the newest counts 2 %."""
    length = DraftLength(3)
    assert length.metrics()["draft_shares"] == [0.7, 0.7, 0.7]
    outcomes: list[list[float]] = [[0.7] * 8 for _ in range(3)]
    for num_drafts, num_right in drafts:
        right = min(num_drafts, num_right)
        length.verified(num_drafts, right)
        for position in range(num_drafts):
            outcomes[position].append(float(position < right))
            if position == right:
                break  # what comes behind a wrong one tells nothing

    def share(seen: list[float]) -> float:
        found = sum(seen[:50]) / len(seen[:50])
        for each in seen[50:]:
            found += 0.02 * (each - found)
        return found

    assert length.metrics()["draft_shares"] == pytest.approx([share(seen) for seen in outcomes], abs=6e-4)


@pytest.mark.parametrize(
    ("num_requests", "num_drafting", "number"), [(4, 4, 6), (4, 2, 6), (4, 1, 0), (5, 3, 6), (5, 2, 0), (0, 0, 0)]
)
def test_what_is_unknown_is_measured_in_steps_of_which_half_have_drafts(
    num_requests: int, num_drafting: int, number: int
) -> None:
    assert DraftLength(6).choose(num_requests, num_drafting) == (number, False)


SECONDS = st.fixed_dictionaries({number: st.floats(0.5, 8.0) for number in LENGTHS})


@given(
    seconds=SECONDS,
    at_rest=st.none() | st.floats(0.3, 4.0),
    right=st.lists(st.integers(0, 6), max_size=40),
    num_drafting=st.integers(1, 4),
    skips_head=st.booleans(),
)
def test_the_number_that_yields_most_tokens_in_a_second(
    seconds: dict[int, float], at_rest: float | None, right: list[int], num_drafting: int, skips_head: bool
) -> None:
    """Another one than none must be better by 3 % if all requests had drafts; then those that have them count."""
    length = measured(seconds, right, skips_head=skips_head)
    if skips_head and at_rest is not None:
        length.took(4, 0, at_rest, head_rested=True)
    shares = length.metrics()["draft_shares"]
    without = (0.75 * seconds[0] if at_rest is None else at_rest) if skips_head else seconds[0]

    def rates(seconds: dict[int, float], drafting: float) -> dict[int, float]:
        tokens, product = [1.0], drafting
        for share in shares:
            product *= share
            tokens.append(tokens[-1] + product)
        return {number: tokens[number] / seconds[number] for number in LENGTHS}

    def best(rate: dict[int, float]) -> int:
        first, second = sorted(rate, key=lambda number: -rate[number])[:2]
        assume(rate[first] > 1.01 * rate[second])  # shares are rounded
        return first

    rate = rates(seconds | {0: without}, 1.0)
    expected = best(rate)
    assume(expected == 0 or abs(rate[expected] / rate[0] / 1.03 - 1) > 0.01)
    if rate[expected] <= 1.03 * rate[0]:
        expected = 0
    chosen = length.choose(4, num_drafting)
    assert length.metrics()["draft_length_chosen"] == {"4": expected}
    if expected == 0:
        assert chosen == (0, skips_head)
    else:
        if num_drafting < 4:
            expected = best(rates(seconds, num_drafting / 4))
        assert chosen == (expected, False)


def test_a_head_reads_the_prompts_of_those_that_are_to_probe() -> None:
    """Once it is time, a step in which nobody may have drafts is read too."""
    length = measured({0: 1.0, 1: 1.1, 3: 1.15, 6: 1.2}, [0] * 200, skips_head=True)
    length.took(4, 0, 1.0, head_rested=True)
    assert {length.choose(4, 0) for _ in range(255)} == {Drafts(0, skips_head=True)}
    assert {length.choose(4, 0) for _ in range(5)} == {Drafts(0)}
    assert [length.choose(4, 1) for _ in range(5)] == [Drafts(6)] * 4 + [Drafts(0, skips_head=True)]


def test_where_the_longest_is_best_nothing_is_probed() -> None:
    """Few requests have drafts: however many steps went by, these do not hold up the others."""
    length = measured({0: 1.0, 1: 1.2, 3: 1.5, 6: 2.5}, [6] * 200)
    assert length.choose(4).number == 6
    assert {length.choose(4, 1).number for _ in range(400)} == {3}


def test_fewer_requests_tell_what_pays_until_it_is_measured() -> None:
    """The nearest smaller number of which all times are known, and none that is larger."""
    pays, does_not = {0: 1.0, 1: 1.01, 3: 1.02, 6: 1.03}, {0: 1.0, 1: 3.0, 3: 5.0, 6: 9.0}
    length = measured(pays, [6] * 100, num_requests=8)
    assert length.choose(4, 1) == (0, False)  # nothing is known
    measured(does_not, num_requests=2, into=length)
    assert length.choose(64, 1).number == 6  # as with 8
    assert length.choose(4, 1).number == 0  # as with 2
    length.took(16, 6, 1.0)
    assert length.choose(64, 1).number == 6
    measured(does_not, num_requests=32, into=length)
    assert length.choose(64, 1).number == 0
