"""Micro-batches of a pipeline's stages: who is admitted to which, and who waits where one is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

from simulated_engine import SimulatedEngine, new_ids, outputs_of

from compiled_engine.engine.messages import EngineRequest, SchedulerOutput
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.pipeline.micro_batches import MicroBatches
from compiled_engine.sampling.params import SamplingParams


def pipeline(**options: int) -> SimulatedEngine:
    """Two stages, without scheduling ahead."""
    rest = {"num_blocks": 200, "max_num_seqs": 4, "max_model_len": 200}
    return SimulatedEngine(steps_in_flight=2, num_micro_batches=2, **rest | options)


def rounds(engine: SimulatedEngine, steps: int) -> Iterator[SchedulerOutput]:
    """The next steps, with both stages busy."""
    for _ in range(steps):
        if len(engine.in_flight) == 2:
            engine.finish_step()
        if (step := engine.try_step()) is not None:
            yield step


def test_who_comes_while_more_run_is_admitted_at_once() -> None:
    """Micro-batches are to be equally full once all have been admitted: those that run count."""
    engine = pipeline()
    for number in range(6):
        engine.add(f"first {number}", [number], params=outputs_of(60))
    assert sum(len(new_ids(step)) for step in rounds(engine, 4)) == 6
    for number in range(2):
        engine.add(f"later {number}", [number, number], params=outputs_of(5))
    admitted = [new_ids(step) for step in rounds(engine, 2)]
    assert admitted == [["later 0"], ["later 1"]]
    engine.run()


def test_a_step_has_no_more_requests_than_a_micro_batch_takes() -> None:
    """However many wait: the others come when its turn is next and somebody has ended."""
    engine = pipeline()
    for number in range(20):
        engine.add(f"r{number}", [number], params=outputs_of(6))
    assert [len(new_ids(step)) for step in rounds(engine, 6)] == [4, 4, 0, 0, 0, 0]
    engine.run()


class Plan:
    """Micro-batches, and requests that are in one, or in none before their first token."""

    def __init__(
        self, numbers: Sequence[int | None], count: int = 2, most_requests: int = 4, in_flight: int = 2
    ) -> None:
        self._batches = MicroBatches(count, most_requests, in_flight)
        self.requests = [Request.of(EngineRequest("r", (1,), SamplingParams()), (0, 0), 9) for _ in numbers]
        for turn in range(count):
            sampling = [each for each, number in zip(self.requests, numbers, strict=True) if number == turn]
            self.parts()
            self.planned(sampling)

    def parts(self, num_waiting: int = 0, num_in_flight: int = 0) -> list[tuple[list[int], int]]:
        """Return the parts in turn: indices of running requests, and the number of others that may join."""
        parts = self._batches.divide(self.requests, range(num_waiting), num_in_flight)
        return [([self.requests.index(request) for request in found], room) for found, room in parts]

    def planned(self, sampling: Sequence[Request]) -> None:
        """A step is planned of the first part."""
        parts = iter(self._batches.divide(self.requests, (), 0))
        next(parts)
        self._batches.planned(cast(StepInFlight, SimpleNamespace(sampling=sampling)))
        for request in sampling:
            request.has_sampled = True

    def ended(self, request: Request) -> None:
        self.requests.remove(request)
        self._batches.ended(request)


def test_where_a_micro_batch_is_full_the_newest_prompts_wait() -> None:
    """Several prompts are under way where log-probabilities bound their chunks."""
    plan = Plan([0, None, 1, None, 0, None])
    assert [found for found, _ in plan.parts()] == [[0, 1, 3, 4], [1, 2, 3, 5]]
    assert Plan([None, None, None, 0, 0, 0]).parts()[0][0] == [0, 3, 4, 5]


def test_as_many_are_admitted_as_make_micro_batches_equally_full() -> None:
    """Requests of other micro-batches and prompts count towards the total; a micro-batch has no more than a step."""
    plan = Plan([0, 0, 0, None, 1], most_requests=8)
    rooms = {waiting: [room for _, room in plan.parts(waiting)] for waiting in (0, 6, 7, 90)}
    assert rooms == {0: [0, 2], 6: [6 - 3, 6 - 1], 7: [6 - 3, 6 - 1], 90: [8 - 4, 8 - 2]}


def test_a_request_that_has_to_begin_again_belongs_to_none() -> None:
    plan = Plan([0, 1])
    assert [found for found, _ in plan.parts()] == [[0], [1]]
    plan.requests[1].has_sampled = False  # preempted, and admitted again
    assert [found for found, _ in plan.parts()] == [[0, 1], [1]]
    plan.ended(plan.requests[0])
    assert [found for found, _ in plan.parts()] == [[0], [0]]


def test_micro_batches_take_turns() -> None:
    """One may have a second step in flight only where steps are scheduled ahead of all."""
    plan = Plan([0, 1, 2], count=3, in_flight=3)

    def turns(num_in_flight: int) -> list[int]:
        return [index for (index,), _ in plan.parts(0, num_in_flight)]

    assert turns(0) == [0, 1, 2]
    plan.planned([])
    assert [turns(number) for number in (0, 1, 2, 3)] == [[1, 2, 0], [1, 2], [1], []]
    ahead = Plan([0, 1, 2], count=3, in_flight=4)
    for _ in range(4):
        ahead.planned([])
    assert [index for (index,), _ in ahead.parts(0, 4)] == [1, 2]  # 0, 1, 2 and 0 are in flight
    assert [index for (index,), _ in ahead.parts(0, 1)] == [1, 2, 0]
