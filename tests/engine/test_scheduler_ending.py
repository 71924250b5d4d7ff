"""How requests end: by length, stop, abort or a failed step, and what of them is left: nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated_engine import SimulatedEngine, new_ids, outputs_of


def finish_by_length(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)), params=outputs_of(1))
    engine.step()


def finish_by_stop(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)), params=outputs_of(9, stop_token_ids=list(range(11))))
    engine.step()


def abort_before_schedule(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)))
    engine.step()
    engine.abort("a")


def abort_in_first_flight(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)))
    engine.begin_step()
    engine.abort("a")
    assert not engine.finish_step()


def abort_in_later_flight(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)))
    engine.step()
    engine.begin_step()
    engine.abort("a")
    assert not engine.finish_step()


def abort_between_chunks(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(100, 170)))
    engine.begin_step()
    engine.abort("a")
    assert not engine.finish_step()


def fail(engine: SimulatedEngine) -> None:
    engine.add("a", list(range(6)))
    engine.begin_step()
    engine.fail_step()


ENDINGS: list[Callable[[SimulatedEngine], None]] = [
    finish_by_length,
    finish_by_stop,
    abort_before_schedule,
    abort_in_first_flight,
    abort_in_later_flight,
    abort_between_chunks,
    fail,
]


class TestEnding:
    @pytest.mark.parametrize("end", ENDINGS)
    def test_blocks_are_freed_once_and_the_row_is_removed_once(self, end: Callable[[SimulatedEngine], None]) -> None:
        engine = SimulatedEngine(num_blocks=32, max_model_len=128)
        end(engine)
        engine.check_idle()
        assert engine.scheduler.schedule() is None
        assert engine.scheduler.abort("a") is None
        engine.add("b", [1], params=outputs_of(2))
        assert engine.begin_step().removed == ("a",)
        engine.finish_step()
        assert engine.begin_step().removed == ()

    @pytest.mark.parametrize("end", ENDINGS)
    def test_an_id_can_be_used_again(self, end: Callable[[SimulatedEngine], None]) -> None:
        engine = SimulatedEngine(num_blocks=32, max_model_len=128)
        end(engine)
        engine.add("a", list(range(6)))
        step = engine.begin_step()
        assert step.removed == ("a",)
        assert new_ids(step) == ["a"]
        engine.finish_step()
        engine.run()

    def test_blocks_are_free_at_once_though_a_step_in_flight_writes_to_them(self) -> None:
        engine = SimulatedEngine(block_size=4)
        engine.add("a", list(range(8)))
        engine.begin_step()
        assert engine.scheduler.metrics()["blocks_free"] == 14
        engine.abort("a")
        assert engine.scheduler.metrics()["blocks_free"] == 16
        assert not engine.finish_step()

    def test_the_result_of_an_aborted_request_does_not_go_to_one_that_took_over_its_id(self) -> None:
        engine = SimulatedEngine()
        engine.add("a", [1, 2, 3])
        engine.begin_step()
        engine.abort("a")
        record = engine.add("a", [4, 5, 6], params=outputs_of(2))
        assert not engine.finish_step()
        assert record.token_ids == []
        engine.run()
        assert record.token_ids == record.expected[0]

    def test_what_a_failed_step_was_to_write_is_not_read(self) -> None:
        engine = SimulatedEngine(budget=16)
        engine.add("a", list(range(30)))
        engine.step()
        engine.begin_step()
        engine.fail_step()
        record = engine.add("b", list(range(30)))
        engine.run()
        assert record.num_cached_tokens == 16

    def test_those_behind_aborted_ones_are_served(self) -> None:
        engine = SimulatedEngine()
        for request_id in "abcd":
            engine.add(request_id, [1, 2, 3], params=outputs_of(2))
        for request_id in "abc":
            engine.abort(request_id)
        assert new_ids(engine.begin_step()) == ["d"]
        engine.finish_step()
        engine.run()

    def test_a_request_that_was_never_admitted_is_not_removed(self) -> None:
        engine = SimulatedEngine()
        engine.add("a", [1])
        engine.abort("a")
        engine.add("b", [1])
        assert engine.begin_step().removed == ()
