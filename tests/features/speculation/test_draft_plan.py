"""The questions and results that the plan of drafts passes to the choosers of their number and sharpness."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runner import next_step

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, NewRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.engine.steps import StepBuilder, StepInFlight
from compiled_engine.features.speculation.draft_length import DraftLength, Drafts
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.features.speculation.draft_sharpness import LEAST, sharpness_of
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.sampling.params import SamplingParams

MOST = 3


class Told(DraftLength):
    """Chooses what it is set to, and keeps what it is asked and told."""

    def __init__(self, number: int = MOST, *, skips_head: bool = False) -> None:
        super().__init__(MOST, skips_head=skips_head)
        self.drafts = Drafts(number)
        self.asked: list[tuple[int, int | None]] = []
        self.times: list[tuple[int, int, float, bool]] = []
        self.in_a_row: list[bool] = []
        self.found: list[tuple[int, int]] = []

    def choose(self, num_requests: int, num_drafting: int | None = None) -> Drafts:
        self.asked.append((num_requests, num_drafting))
        return self.drafts

    def took(
        self, num_requests: int, num_drafts: int, seconds: float, *, head_rested: bool = False, in_a_row: bool = True
    ) -> None:
        self.times.append((num_requests, num_drafts, seconds, head_rested))
        self.in_a_row.append(in_a_row)

    def verified(self, num_drafts: int, num_right: int) -> None:
        self.found.append((num_drafts, num_right))


def made(
    length: DraftLength | None, *, steps_in_flight: int = 1, budget: int = 16, most: int = 2, **rest: Any
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=budget, max_model_len=64, policy="fcfs")
    cache = CacheConfig(4, None, 0.9, True)
    plan = DraftPlan(MOST, most, steps_in_flight, length=length, **rest)
    return Scheduler(config, cache, 64, 11, steps_in_flight, 1 + MOST, features=[plan])


def add(scheduler: Scheduler, name: str, prompt: int = 2, **params: Any) -> None:
    params = {"max_tokens": 40, "ignore_eos": True} | params
    scheduler.add(EngineRequest(name, (1,) * prompt, SamplingParams(**params)))


def result_of(counts: Sequence[int], num_drafts: Sequence[int] | None) -> RunnerOutput:
    """Return the result of a step that yields so many tokens for its requests, of so many drafts each."""
    columns = {}
    if num_drafts is not None:
        columns[VERIFIED_DRAFTS] = [(number, count - 1) for number, count in zip(num_drafts, counts, strict=True)]
    return RunnerOutput([3] * sum(counts), lengths=list(counts), columns=columns)


def run(scheduler: Scheduler, *counts: int, num_drafts: list[int] | None = None) -> SchedulerOutput:
    """A step that yields so many tokens for its requests."""
    step = next_step(scheduler)
    scheduler.update(step, result_of(counts, num_drafts))
    return step


def test_it_is_asked_for_the_requests_of_the_step_that_may_have_drafts() -> None:
    """If no request runs yet, waiting ones count. Prompts, and requests with one token per step, have no drafts."""
    length = Told()
    scheduler = made(length)
    for name in "abc":
        add(scheduler, name, presence_penalty=0.5 * (name == "b"))
    run(scheduler, 1, 1)
    run(scheduler, 4, 1)
    scheduler.abort("b")
    scheduler.abort("c")
    add(scheduler, "d", prompt=30)
    assert run(scheduler, 2).counts == [4, 12]
    run(scheduler, 2)
    assert length.asked == [(2, 0), (2, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("number", [0, 1, MOST])
def test_a_step_has_as_many_as_are_chosen(number: int) -> None:
    scheduler = made(Told(number))
    add(scheduler, "a")
    run(scheduler, 1)
    assert run(scheduler, 1).counts == [1 + number]


@pytest.mark.parametrize(("budget", "running"), [(15, 3), (16, 4), (40, 4)])
def test_as_many_run_as_a_step_holds_with_their_drafts(budget: int, running: int) -> None:
    scheduler = made(Told(), budget=budget, most=4)
    for name in "abcdef":
        add(scheduler, name, prompt=1)
    assert run(scheduler, *[1] * running).counts == [1] * running
    assert run(scheduler, *[1] * running).counts == [4] * running


def test_it_is_told_of_each_request_what_was_right_of_what_it_might_have() -> None:
    """A request that is nearly as long as it may be has fewer, and one of a token a step none."""
    length = Told()
    scheduler = made(length)
    add(scheduler, "a", max_tokens=8)
    add(scheduler, "b", frequency_penalty=1.0)
    run(scheduler, 1, 1)
    for counts in ((1, 1), (4, 1), (2, 1)):
        run(scheduler, *counts)
    assert length.found == [(3, 0), (3, 3), (1, 1)]


def test_it_is_told_how_long_a_step_had_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it was scheduled, or from the result of the one before if that came later."""
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("compiled_engine.features.speculation.draft_plan.time", clock)
    length = Told(0)
    scheduler = made(length, steps_in_flight=2)
    add(scheduler, "a")
    add(scheduler, "b")
    steps = []
    for scheduled, taken in ((1.0, None), (2.0, 10.0), (11.0, 13.0), (14.0, 20.0)):
        now = scheduled
        steps.append(next_step(scheduler))
        if taken is not None:
            now = taken
            scheduler.update(steps.pop(0), RunnerOutput([3, 3], lengths=[1, 1]))
    # The first one had prompts; the second was scheduled at 2, and the first had the device until 10.
    assert length.times == [(2, 0, 3.0, False), (2, 0, 7.0, False)]
    assert length.in_a_row == [False, True]


@pytest.mark.parametrize(
    ("steps_in_flight", "told"),
    [
        (1, [(1, False), (1, True), (1, True), (2, True), (2, True), (3, True), (3, True)]),
        # The host has made the rows of the next step before a result comes.
        (2, [(1, False), (1, True), (2, True), (3, True)]),
    ],
)
def test_it_is_told_of_steps_between_others_of_their_number(steps_in_flight: int, told: list[tuple[int, bool]]) -> None:
    """And whether they were in a row: not behind a prompt."""
    length = Told(1)
    scheduler = made(length, steps_in_flight=steps_in_flight)
    add(scheduler, "a", max_tokens=None)
    steps = []
    for number in (1, 1, 1, 1, 3, 2, 2, 2, 3, 3, 3, 1):
        length.drafts = Drafts(number)
        steps.append(next_step(scheduler))
        if len(steps) == steps_in_flight:
            scheduler.update(steps.pop(0), RunnerOutput([3], lengths=[1]))
    assert [(number, in_a_row) for (_, number, *_), in_a_row in zip(length.times, length.in_a_row, strict=True)] == told


def test_a_step_beside_one_of_other_requests_is_not_in_a_row() -> None:
    length = Told(1)
    scheduler = made(length)
    add(scheduler, "a")
    add(scheduler, "b")
    run(scheduler, 1, 1)
    run(scheduler, 1, 1)
    run(scheduler, 1, 1)
    scheduler.abort("b")
    run(scheduler, 1)
    run(scheduler, 1)
    assert [times[0] for times in length.times] == [2, 2, 1, 1]
    assert length.in_a_row == [False, True, False, True]


@pytest.mark.parametrize("rests", [False, True])
def test_it_is_told_whether_the_head_rested(rests: bool) -> None:
    length = Told(0, skips_head=True)
    length.drafts = Drafts(0, rests)
    scheduler = made(length)
    add(scheduler, "a")
    for _ in range(3):
        step = next_step(scheduler)
        scheduler.update(step, RunnerOutput([3]))
        assert step.single == rests
    assert [(count, number, rested) for count, number, _, rested in length.times] == [(1, 0, rests)] * 2
    metrics = scheduler.metrics()
    assert (metrics["resting"], metrics["rested"]) == (rests, rests)


def test_a_head_that_has_nobody_to_draft_for_rests() -> None:
    """All its requests rest, or get a token a step: then it does not read, though it was not told to rest."""
    length = Told(0, skips_head=True)
    scheduler = made(length)
    add(scheduler, "a", frequency_penalty=1.0)
    assert next_step(scheduler).single
    scheduler = made(Told(MOST, skips_head=True))
    add(scheduler, "a", frequency_penalty=1.0)
    assert not next_step(scheduler).single  # drafts pay: there will be others
    length = Told(0, skips_head=True)
    length.drafts = Drafts(0, skips_head=True)
    scheduler = made(length)
    add(scheduler, "a")
    run_at_rest = next_step(scheduler)
    scheduler.update(run_at_rest, RunnerOutput([3]))
    length.drafts = Drafts(0)
    assert next_step(scheduler).single


def test_the_only_sharpness_is_that_of_every_step() -> None:
    scheduler = made(None, sharpnesses=(2.5,))
    add(scheduler, "a")
    assert sharpness_of(run(scheduler, 1)) == sharpness_of(run(scheduler, 4)) == 2.5
    assert "draft_sharpness" not in scheduler.metrics()
    plain = made(None)
    add(plain, "a")
    assert run(plain, 1).extras == {}


def test_of_several_sharpnesses_the_one_with_right_first_drafts_is_found() -> None:
    """A greedy request tells nothing; nor does one whose step had no drafts."""
    scheduler = made(None, sharpnesses=(1.0, 3.0))
    add(scheduler, "greedy", temperature=0, max_tokens=None)
    add(scheduler, "sampled", max_tokens=None)
    run(scheduler, 1, 1, num_drafts=[0, 0])
    for number in range(20 * LEAST):
        step = next_step(scheduler)
        is_right = sharpness_of(step) == 3.0
        counts = [1, 2 if is_right else 1] if len(step.counts) == 2 else [1]
        scheduler.update(step, result_of(counts, [3] * len(counts)))
        for name in ("greedy", "sampled"):
            if name not in step.request_ids or number % 10 == 9:
                scheduler.abort(name)
                add(scheduler, name, temperature=0 if name == "greedy" else 1, max_tokens=None)
        if number % 10 == 9:
            run(scheduler, 1, 1, num_drafts=[0, 0])
    metrics = scheduler.metrics()
    assert metrics["draft_sharpness"] == "3"
    assert metrics["draft_sharpness_shares"] == {"1": 0.0, "3": 1.0}


@pytest.mark.parametrize(
    ("shares", "num_prefill_tokens", "is_new", "num_drafts"),
    [
        ((4, 4), 0, False, 3),
        ((4, 1), 0, False, 3),
        ((4, 1, 1), 0, False, None),
        ((4, 4), 4, False, None),
        ((4, 4), 0, True, None),
    ],
)
def test_the_time_of_a_step_tells_of_drafts_if_half_of_its_requests_have_them(
    shares: tuple[int, ...], num_prefill_tokens: int, is_new: bool, num_drafts: int | None
) -> None:
    length = Told()
    plan = DraftPlan(MOST, 4, 1, length=length)
    for _ in range(2):  # the second one has another before it
        builder = StepBuilder(decode_tokens=1 + MOST, num_prefill_tokens=num_prefill_tokens)
        for name, count in zip("abc", shares, strict=False):
            asked = EngineRequest(name, (1, 2, 3), SamplingParams())
            builder.add(Request.of(asked, (0, 0), 100, 1 + MOST), 4, count, True)
        if is_new:
            builder.new.append(NewRequest("a", (1,), 1, SamplingParams(), frozenset(), ()))
        plan.built(builder)
        step = StepInFlight.of(1, builder, (), [], any_late=False)
        plan.planned(step)
        plan.updated(step, RunnerOutput([3] * len(shares)))
    assert [found for _, found, _, _ in length.times] == ([] if num_drafts is None else [num_drafts])
