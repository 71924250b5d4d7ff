"""Two steps in flight, by example: what is scheduled before the tokens are known, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import shares_of
from simulated_engine import SimulatedEngine, outputs_of

from compiled_engine.engine.messages import RunnerOutput, SchedulerOutput


def make_engine(**limits: Any) -> SimulatedEngine:
    return SimulatedEngine(steps_in_flight=2, **limits)


def shares(step: SchedulerOutput | None) -> list[tuple[str, int, int, bool]]:
    """(id, tokens computed before, tokens to compute, whether one is sampled) of each request in the step."""
    assert step is not None
    return [(s.request_id, s.num_computed_tokens, s.num_tokens, s.samples) for s in shares_of(step)]


def blocks_free(engine: SimulatedEngine) -> int:
    return int(engine.scheduler.metrics()["blocks_free"])


def test_a_token_is_scheduled_before_it_is_known() -> None:
    engine = make_engine(budget=4)
    engine.add("a", list(range(6)), params=outputs_of(3))
    steps = [shares(engine.begin_step()), shares(engine.begin_step())]
    assert not engine.finish_step()
    steps.append(shares(engine.begin_step()))
    assert steps == [[("a", 0, 4, False)], [("a", 4, 2, True)], [("a", 6, 1, True)]]
    engine.run()


def test_no_third_step() -> None:
    engine = make_engine()
    engine.add("a", [1])
    first, second = engine.begin_step(), engine.begin_step()
    with pytest.raises(RuntimeError, match=f"step {first.step} is in flight"):
        engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match=f"step {second.step} is not the oldest one in flight"):
        engine.scheduler.update(second, RunnerOutput([0]))


class TestEnding:
    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_the_length_is_foreseen_and_what_the_request_held_serves_the_next_step(self, max_tokens: int) -> None:
        engine = make_engine(max_num_seqs=1)
        first = engine.add("a", [1, 2, 3], params=outputs_of(max_tokens))
        engine.add("b", [4, 5, 6], params=outputs_of(1))
        for _ in range(max_tokens - 1):
            engine.step()
        while shares(step := engine.begin_step())[0][0] == "a":
            pass
        assert (step.removed, shares(step)) == (("a",), [("b", 0, 3, True)])
        assert first.finish_reason is None
        engine.run()

    def test_all_is_free_while_the_last_token_is_in_flight(self) -> None:
        engine = make_engine()
        record = engine.add("a", [1, 2, 3], params=outputs_of(1))
        engine.begin_step()
        assert engine.try_step() is None
        assert blocks_free(engine) == 16
        assert engine.scheduler.has_unfinished()
        assert engine.scheduler.metrics()["running"] == 1
        engine.finish_step()
        assert record.finish_reason == "length"
        engine.check_idle()

    @pytest.mark.parametrize("end", ["abort", "fail"])
    def test_a_request_whose_last_token_is_in_flight_can_be_ended(self, end: str) -> None:
        engine = make_engine()
        engine.add("a", [1, 2, 3], params=outputs_of(1))
        engine.begin_step()
        assert engine.try_step() is None
        if end == "abort":
            engine.abort("a")
            assert not engine.finish_step()
        else:
            engine.fail_step()
        engine.check_idle()
        engine.add("a", [1, 2, 3])
        assert engine.begin_step().removed == ("a",)

    def test_what_is_sampled_after_a_stop_token_is_dropped(self) -> None:
        engine = make_engine()
        record = engine.add("a", [1, 2, 3], params=outputs_of(9, stop_token_ids=list(range(11))))
        engine.begin_step()
        assert shares(engine.begin_step()) == [("a", 3, 1, True)]
        engine.finish_step()
        assert len(record.token_ids) == 1
        engine.check_idle()
        assert not engine.finish_step()
        assert engine.try_step() is None

    def test_an_id_is_used_again_while_two_steps_of_its_last_owner_are_in_flight(self) -> None:
        engine = make_engine()
        engine.add("a", [1, 2, 3], params=outputs_of(9, logprobs=0, prompt_logprobs=0))
        engine.begin_step()
        engine.begin_step()
        engine.abort("a")
        record = engine.add("a", [4, 5, 6], params=outputs_of(2, logprobs=0, prompt_logprobs=0))
        assert not engine.finish_step()
        step = engine.begin_step()
        assert (step.removed, [new.token_ids for new in step.new]) == (("a",), [(4, 5, 6)])
        assert not engine.finish_step()
        engine.run()
        assert record.finish_reason == "length"

    def test_prompt_logprobs_of_a_request_that_was_aborted_go_to_nobody(self) -> None:
        engine = make_engine(budget=4)
        engine.add("a", list(range(12)), params=outputs_of(1, prompt_logprobs=0))
        engine.begin_step()
        engine.begin_step()
        engine.abort("a")
        engine.add("a", list(range(12)), params=outputs_of(1, prompt_logprobs=0))
        assert not engine.finish_step()
        assert not engine.finish_step()
        engine.run()


class TestPreemption:
    def preempt(self, **rest: Any) -> SimulatedEngine:
        """Request b was just preempted with a token in flight."""
        engine = make_engine(block_size=1, num_blocks=8, prefix_caching=False)
        engine.add("a", [1], params=outputs_of(7))
        engine.add("b", [2], params=outputs_of(9, **rest))
        while engine.begin_step().removed != ("b",):
            if len(engine.in_flight) == 2:
                engine.finish_step()
        assert [record.request.request_id for record in engine.in_flight[0][2]] == ["a", "b"]
        return engine

    def test_the_token_in_flight_is_kept_and_part_of_the_resumed_request(self) -> None:
        engine = self.preempt()
        known = len(engine.live["b"].token_ids)
        engine.finish_step()
        assert len(engine.live["b"].token_ids) == known + 1
        while not (step := engine.begin_step()).new:
            engine.finish_step()
        assert step.new[0].token_ids == (2, *engine.live["b"].token_ids)
        engine.run()

    def test_the_token_in_flight_may_be_the_last(self) -> None:
        record = self.preempt().live["b"]
        last = len(record.token_ids) + 1
        engine = self.preempt(stop_token_ids=[record.expected[0][last - 1]], min_tokens=last)
        record = engine.live["b"]
        engine.finish_step()
        assert (record.finish_reason, len(record.token_ids)) == ("stop", last)
        assert engine.scheduler.metrics()["waiting"] == 0
        engine.run()


class TestPrefixCache:
    def test_a_block_is_found_once_its_tokens_are_known(self) -> None:
        engine = make_engine(block_size=4)
        record = engine.add("a", [1, 2, 3], params=outputs_of(9))
        engine.begin_step()
        engine.begin_step()  # computes the fourth token, which is not known
        follow_up = [1, 2, 3, record.expected[0][0], 9]
        engine.finish_step()
        reader = engine.add("b", follow_up, params=outputs_of(2))
        engine.begin_step()
        assert reader.num_cached_tokens == 4
        engine.run()

    def test_the_last_block_is_found_though_the_request_was_let_go_early(self) -> None:
        engine = make_engine(block_size=4)
        record = engine.add("a", [1, 2, 3], params=outputs_of(6))
        engine.run()
        reader = engine.add("b", [1, 2, 3, *record.token_ids])
        engine.begin_step()
        assert reader.num_cached_tokens == 8
        engine.run()

    def test_what_a_stopped_request_still_writes_spoils_nothing(self) -> None:
        """The step whose token is dropped writes the stop token, which may fill a block that others read."""
        for length in range(1, 9):
            engine = make_engine(block_size=4)
            prompt = list(range(length))
            record = engine.add("a", prompt, params=outputs_of(9, stop_token_ids=list(range(11))))
            engine.begin_step()
            engine.begin_step()
            engine.finish_step()
            reader = engine.add("b", [*prompt, *record.token_ids, 3], params=outputs_of(3))
            engine.begin_step()
            assert reader.num_cached_tokens == (length + 1) // 4 * 4
            engine.run()


class TestFailure:
    def test_what_steps_in_flight_were_to_write_is_not_read(self) -> None:
        engine = make_engine(budget=8)
        engine.add("a", list(range(40)))
        engine.begin_step()
        engine.begin_step()
        engine.finish_step()
        engine.begin_step()
        engine.fail_step()
        record = engine.add("b", list(range(40)))
        engine.run()
        assert record.num_cached_tokens == 8

    def test_not_even_of_a_request_that_was_aborted(self) -> None:
        engine = make_engine(budget=8)
        engine.add("a", list(range(40)))
        engine.begin_step()
        engine.abort("a")
        engine.add("b", [7], params=outputs_of(5))
        engine.begin_step()
        engine.fail_step()
        record = engine.add("c", list(range(40)))
        engine.run()
        assert record.num_cached_tokens == 0

    def test_nor_of_a_block_whose_token_came_to_be_known(self) -> None:
        engine = make_engine(block_size=4)
        record = engine.add("a", [1, 2, 3], params=outputs_of(9))
        engine.begin_step()
        engine.begin_step()
        engine.finish_step()
        engine.fail_step()
        reader = engine.add("b", [1, 2, 3, record.expected[0][0], 9])
        engine.run()
        assert reader.num_cached_tokens == 0

    @pytest.mark.parametrize("launching", [False, True])
    def test_removals_are_sent_again_and_who_waits_goes_on(self, launching: bool) -> None:
        engine = make_engine(max_num_seqs=2)
        engine.add("gone", [1], params=outputs_of(1))
        engine.add("a", [2], params=outputs_of(9))
        engine.begin_step()
        assert engine.begin_step().removed == ("gone",)
        waiting = engine.add("w", [3], params=outputs_of(1), priority=1)
        if launching:
            engine.finish_step()
            engine.add("w2", [4], params=outputs_of(1))
        engine.fail_step(launching=launching)
        assert (waiting.finish_reason is None) == (not launching)
        engine.add("z", [5], params=outputs_of(1))
        assert set(engine.begin_step().removed) >= {"gone", "a"}
        engine.run()
