"""The number of drafts of a step follows acceptance and cost."""

from __future__ import annotations

import random

import pytest

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.speculation.draft_length import LEAST_STEPS, PROBE_EVERY, DraftLength
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import VERIFIED_DRAFTS


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


def test_steps_that_are_held_up_do_not_decide() -> None:
    """Two steps behind a pause of the process change nothing; three in a row are the new time."""
    length = DraftLength(4)
    run(length, 0.0, CHEAP, 300)
    before = length.metrics()["draft_step_ms"]
    for _ in range(2):
        length.took(3, 0, 1000.0)
    assert length.metrics()["draft_step_ms"] == before
    run(length, 0.0, CHEAP, 2 * PROBE_EVERY)
    assert length.metrics()["draft_length_chosen"] == {"4": 0}
    for _ in range(3):
        length.took(3, 0, 1000.0)
    assert length.choose(3).number == 1
    assert length.metrics()["draft_step_ms"]["4"]["0"] == 1e6


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
