"""Micro-batches of a pipeline's stages: who is admitted to which, and who waits where a micro-batch is full."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from simulated_engine import SimulatedEngine, new_ids, outputs_of

from compiled_engine.core.steps import MicroBatches
from compiled_engine.messages import SchedulerOutput


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
    """However many wait: the others come when the micro-batch's turn is next and somebody has ended."""
    engine = pipeline()
    for number in range(20):
        engine.add(f"r{number}", [number], params=outputs_of(6))
    assert [len(new_ids(step)) for step in rounds(engine, 6)] == [4, 4, 0, 0, 0, 0]
    engine.run()


def test_where_a_micro_batch_is_full_the_newest_prompts_wait() -> None:
    """Several prompts are under way where log-probabilities bound their chunks."""
    requests: Any = [SimpleNamespace(micro_batch=micro_batch) for micro_batch in (0, None, 1, None, 0, None)]
    micro_batches = MicroBatches(2, most_requests=4, steps_in_flight=2)
    assert micro_batches.of_step(requests, 0) == [requests[index] for index in (0, 1, 3, 4)]
    assert micro_batches.of_step(requests, 1) == [requests[index] for index in (1, 2, 3, 5)]
    before_others: Any = [SimpleNamespace(micro_batch=micro_batch) for micro_batch in (None, None, None, 0, 0, 0)]
    assert micro_batches.of_step(before_others, 0) == [before_others[index] for index in (0, 3, 4, 5)]
    assert MicroBatches(1, most_requests=2, steps_in_flight=2).of_step(requests, 0) is requests


def test_as_many_are_admitted_as_make_micro_batches_equally_full() -> None:
    """Those of other micro-batches, and prompts that have none yet, count for the whole; a micro-batch takes no more
    than a step."""
    micro_batches = MicroBatches(2, most_requests=8, steps_in_flight=2)
    of_step: Any = [SimpleNamespace(micro_batch=micro_batch) for micro_batch in (0, 0, 0, None)]
    assert micro_batches.room(of_step, 0, num_running=5, num_waiting=0) == 0
    assert micro_batches.room(of_step, 0, num_running=5, num_waiting=6) == 6 - 3
    assert micro_batches.room(of_step, 0, num_running=5, num_waiting=7) == 6 - 3
    assert micro_batches.room(of_step, 0, num_running=5, num_waiting=90) == 8 - 4
    assert micro_batches.room(of_step, 1, num_running=5, num_waiting=3) == 4
    assert MicroBatches(1, most_requests=8, steps_in_flight=2).room(of_step, 0, num_running=4, num_waiting=90) == 90


def test_micro_batches_take_turns() -> None:
    """A micro-batch may have a second step in flight only where steps are scheduled ahead of all micro-batches."""
    micro_batches = MicroBatches(3, most_requests=4, steps_in_flight=3)
    assert list(micro_batches.in_turn([])) == [0, 1, 2]
    micro_batches.took(0)
    assert list(micro_batches.in_turn([])) == [1, 2, 0]
    assert list(micro_batches.in_turn([0, 2])) == [1]
    ahead = MicroBatches(3, most_requests=4, steps_in_flight=4)
    assert list(ahead.in_turn([0, 1, 1])) == [0, 2]
