"""The scheduler by example. Every step also goes through the checks of SimulatedEngine and FakeRunner."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import VOCAB_SIZE, shares_of
from simulated_engine import SimulatedEngine, new_ids, outputs_of

from compiled_engine.engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.sampling.sampled_tokens import LogprobRows


def shares(step: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    """(id, tokens computed before, tokens to compute, whether one is sampled) of each request in the step."""
    return [(s.request_id, s.num_computed_tokens, s.num_tokens, s.samples) for s in shares_of(step)]


class TestBudget:
    def test_a_long_prompt_is_chunked_and_samples_only_at_its_end(self) -> None:
        engine = SimulatedEngine(budget=8)
        engine.add("a", list(range(20)), params=outputs_of(2))
        steps = []
        while engine.live:
            steps.append(shares(engine.begin_step()))
            engine.finish_step()
        assert steps == [
            [("a", 0, 8, False)],
            [("a", 8, 8, False)],
            [("a", 16, 4, True)],
            [("a", 20, 1, True)],
        ]

    def test_decodes_come_first_and_share_the_step_with_a_prefill(self) -> None:
        engine = SimulatedEngine(budget=8)
        engine.add("a", [1, 2, 3])
        engine.step()
        engine.add("b", list(range(10)))
        engine.add("c", [1])
        assert shares(engine.begin_step()) == [("a", 3, 1, True), ("b", 0, 7, False)]
        engine.finish_step()
        assert shares(engine.begin_step()) == [("a", 4, 1, True), ("c", 0, 1, True), ("b", 7, 3, True)]

    def test_prompts_share_a_bound_of_their_own_beside_decodes(self) -> None:
        engine = SimulatedEngine(budget=20, max_prefill_tokens=5)
        engine.add("a", list(range(12)))  # alone: whole
        assert shares(engine.begin_step()) == [("a", 0, 12, True)]
        engine.finish_step()
        engine.add("b", list(range(20, 23)), params=outputs_of(1))
        engine.add("c", list(range(30, 39)), params=outputs_of(1))
        steps = []
        for _ in range(4):
            steps.append([share for share in shares(engine.begin_step()) if share[0] != "a"])
            engine.finish_step()
        assert steps == [[("b", 0, 3, True), ("c", 0, 2, False)], [("c", 2, 5, False)], [("c", 7, 2, True)], []]

    @pytest.mark.parametrize("num_prefill_tokens", [1, 5, 20, None])
    def test_a_long_prompt_is_bounded_only_beside_others(self, num_prefill_tokens: int | None) -> None:
        """Alone it has whole steps, also behind its first; beside a decode the bound, or what the decode leaves."""
        engine = SimulatedEngine(budget=20, max_prefill_tokens=num_prefill_tokens, num_blocks=64)
        engine.add("a", list(range(50)))
        for start, count in ((0, 20), (20, 20), (40, 10)):
            assert shares(engine.begin_step()) == [("a", start, count, start == 40)]
            engine.finish_step()
        engine.add("b", list(range(100, 150)))
        count = min(19, num_prefill_tokens or 19)
        for start in (0, count):
            assert shares(engine.begin_step())[1:] == [("b", start, count, False)]
            engine.finish_step()

    def test_prompts_are_not_bounded_beside_prompts_alone(self) -> None:
        """A prompt whose chunks end early leaves tokens to the running ones first, then to waiting ones."""
        engine = SimulatedEngine(budget=20, max_prefill_tokens=2, num_blocks=64, num_snapshots=4)
        engine.add("a", list(range(10)))
        engine.add("b", list(range(100, 130)))
        assert shares(engine.begin_step()) == [("a", 0, 8, False), ("b", 0, 12, False)]
        engine.finish_step()
        engine.add("c", list(range(200, 210)))
        assert shares(engine.begin_step()) == [("a", 8, 2, True), ("b", 12, 16, False), ("c", 0, 2, False)]
        engine.finish_step()
        assert shares(engine.begin_step()) == [("a", 10, 1, True), ("b", 28, 2, True)]
        engine.finish_step()
        engine.run()

    def test_chunks_of_one_token_count_towards_the_bound_of_prompts(self) -> None:
        engine = SimulatedEngine(budget=20, max_prefill_tokens=1)
        engine.add("a", [1])
        engine.step()
        for request_id in "bc":
            engine.add(request_id, [ord(request_id), 2, 3], params=outputs_of(1))
        prompts = []
        for _ in range(5):
            prompts.append([(share[0], share[2]) for share in shares(engine.begin_step())[1:]])
            engine.finish_step()
        # The last token of a prompt is a decode.
        assert prompts == [[("b", 1)], [("b", 1)], [("b", 1), ("c", 1)], [("c", 1)], [("c", 1)]]
        engine.run()

    @pytest.mark.parametrize("max_tokens", [8, 3, 2])
    def test_a_decode_with_few_drafts_bounds_prompts_too(self, max_tokens: int) -> None:
        """The last steps of a request verify fewer drafts than others."""
        engine = SimulatedEngine(budget=20, max_prefill_tokens=5, max_new_tokens_per_step=4, num_blocks=64)
        engine.add("a", [1, 2], params=outputs_of(max_tokens))
        engine.step()
        engine.add("b", list(range(100, 130)))
        count = min(4, max_tokens - 1)
        assert shares(engine.begin_step()) == [("a", 2, count, True), ("b", 0, 5, False)]
        engine.finish_step()
        engine.run()

    def test_the_bound_of_prompts_grows_with_the_queue(self) -> None:
        engine = SimulatedEngine(budget=60, max_prefill_tokens=2, num_blocks=64, max_num_seqs=32)
        engine.add("a", [1])
        engine.step()
        for index in range(16):
            engine.add(str(index), list(range(10 * index, 10 * index + 4)), params=outputs_of(1))
        sizes = []
        for _ in range(6):
            sizes.append(sum(count for request_id, _, count, _ in shares(engine.begin_step()) if request_id != "a"))
            engine.finish_step()
        assert sizes == [8, 6, 6, 4, 4, 4]
        engine.run()

    @pytest.mark.parametrize(("max_new_tokens_per_step", "budget", "left"), [(1, 8, 5), (2, 9, 3)])
    def test_an_urgent_long_prompt_does_not_hold_up_decodes(
        self, max_new_tokens_per_step: int, budget: int, left: int
    ) -> None:
        """Nor their drafts."""
        engine = SimulatedEngine(budget=budget, policy="priority", max_new_tokens_per_step=max_new_tokens_per_step)
        for request_id in "abc":
            engine.add(request_id, [1], priority=5)
        engine.step()
        engine.add("urgent", list(range(30)), priority=0)
        for start in (0, left, 2 * left):
            step = engine.begin_step()
            assert [share[0] for share in shares(step)] == ["a", "b", "c", "urgent"]
            assert shares(step)[3] == ("urgent", start, left, False)
            engine.finish_step()

    def test_no_more_than_max_num_seqs_run(self) -> None:
        engine = SimulatedEngine(max_num_seqs=2)
        for request_id in "abc":
            engine.add(request_id, [1, 2], params=outputs_of(3))
        assert new_ids(engine.begin_step()) == ["a", "b"]
        engine.finish_step()
        assert engine.scheduler.metrics()["waiting"] == 1
        engine.run()


class TestOrder:
    def test_who_cannot_be_admitted_blocks_those_behind(self) -> None:
        engine = SimulatedEngine(block_size=4, num_blocks=8)
        engine.add("a", list(range(16)), params=outputs_of(3))
        engine.add("big", list(range(100, 124)), params=outputs_of(1))
        engine.add("small", [1], params=outputs_of(1))
        admitted = []
        while engine.live:
            admitted.append(new_ids(engine.begin_step()))
            engine.finish_step()
        assert admitted == [["a"], [], [], ["big", "small"]]

    def test_priority_goes_before_arrival(self) -> None:
        engine = SimulatedEngine(policy="priority", max_num_seqs=1)
        for request_id, priority in [("low", 2), ("high", -1), ("mid", 0), ("mid2", 0)]:
            engine.add(request_id, [1], priority=priority, params=outputs_of(1))
        order = []
        while engine.live:
            order += new_ids(engine.begin_step())
            engine.finish_step()
        assert order == ["high", "mid", "mid2", "low"]

    def test_first_come_first_served_ignores_priority(self) -> None:
        engine = SimulatedEngine(max_num_seqs=1)
        engine.add("a", [1], priority=9)
        engine.add("b", [1], priority=0)
        assert new_ids(engine.begin_step()) == ["a"]

    def test_an_aborted_waiting_request_unblocks_those_behind(self) -> None:
        engine = SimulatedEngine(block_size=4, num_blocks=8)
        engine.add("a", list(range(16)))
        engine.add("big", list(range(100, 124)))
        engine.add("small", [1])
        engine.step()
        engine.abort("big")
        step = engine.begin_step()
        assert new_ids(step) == ["small"]
        assert step.removed == ()


class TestPreemption:
    def start(self, priorities: tuple[int, int, int] = (0, 0, 0), **limits: Any) -> SimulatedEngine:
        """Three requests that need 5 blocks each before they end, and 10 blocks."""
        engine = SimulatedEngine(block_size=2, num_blocks=10, prefix_caching=False, **limits)
        for request_id, first, priority in zip("abc", (10, 20, 30), priorities, strict=True):
            engine.add(request_id, [first, 1, 2], priority=priority, params=outputs_of(8))
        return engine

    def step_to_preemption(self, engine: SimulatedEngine) -> SchedulerOutput:
        for _ in range(20):
            step = engine.begin_step()
            if step.removed:
                return step
            engine.finish_step()
        raise AssertionError("nothing was preempted")

    def test_nobody_is_admitted_to_the_step_that_preempts(self) -> None:
        """Not even one that would come first, and fits into what is left of the blocks."""
        engine = SimulatedEngine(block_size=4, num_blocks=7, prefix_caching=False, policy="priority")
        engine.add("a", list(range(7)), params=outputs_of(12))
        engine.add("b", list(range(11)), priority=5, params=outputs_of(12))
        while engine.scheduler.metrics()["blocks_free"] > 0:
            engine.step()
        engine.add("c", [1], priority=1, params=outputs_of(2))
        step = self.step_to_preemption(engine)
        assert (step.removed, step.new) == (("b",), ())
        engine.finish_step()
        assert new_ids(engine.begin_step()) == ["c"]
        engine.finish_step()
        engine.run()

    def test_the_newest_is_preempted_and_its_row_removed(self) -> None:
        engine = self.start()
        step = self.step_to_preemption(engine)
        assert step.removed == ("c",)
        assert step.new == ()
        assert [share.request_id for share in shares_of(step)] == ["a", "b"]
        assert engine.scheduler.metrics()["preemptions"] == 1
        engine.finish_step()
        engine.run()

    def test_the_least_urgent_is_preempted_under_the_priority_policy(self) -> None:
        engine = self.start((2, 1, 1), policy="priority")
        assert self.step_to_preemption(engine).removed == ("a",)
        engine.finish_step()
        engine.run()

    def test_a_resumed_request_is_prefilled_with_its_outputs_and_not_taken_for_a_decode(self) -> None:
        engine = self.start()
        self.step_to_preemption(engine)
        engine.finish_step()
        generated = len(engine.live["c"].token_ids)
        assert generated > 1
        while not (step := engine.begin_step()).new:
            engine.finish_step()
        (resumed,) = step.new
        assert (resumed.request_id, resumed.num_prompt_tokens) == ("c", 3)
        assert resumed.token_ids == (30, 1, 2, *engine.live["c"].token_ids)
        assert shares(step)[-1] == ("c", 0, 3 + generated, True)
        engine.finish_step()
        engine.run()

    def test_a_resumed_request_is_chunked_without_sampling_before_its_last_token(self) -> None:
        engine = self.start(budget=3)
        self.step_to_preemption(engine)
        engine.finish_step()
        record = engine.live["c"]
        generated = len(record.token_ids)
        chunks: list[tuple[str, int, int, bool]] = []
        while len(record.token_ids) == generated:
            chunks += [share for share in shares(engine.begin_step()) if share[0] == "c"]
            engine.finish_step()
        assert len(chunks) > 1
        assert [samples for *_, samples in chunks] == [False] * (len(chunks) - 1) + [True]
        assert sum(num_tokens for _, _, num_tokens, _ in chunks) == 3 + generated
        engine.run()

    def test_preempted_requests_resume_in_order_of_arrival_and_before_new_ones(self) -> None:
        engine = SimulatedEngine(block_size=1, num_blocks=18, max_num_seqs=4, prefix_caching=False)
        for request_id, first in zip("abcd", (10, 20, 30, 40), strict=True):
            engine.add(request_id, [first], params=outputs_of(9))
        removed: list[str] = []
        resumed: list[str] = []
        engine.step()
        engine.add("late", [50], params=outputs_of(1))
        while engine.live:
            step = engine.begin_step()
            removed += [i for i in step.removed if i in engine.waiting]
            resumed += new_ids(step)
            engine.finish_step()
        assert removed == ["d", "c"]
        assert resumed == ["c", "d", "late"]

    def test_room_to_grow_is_left_when_admitting(self) -> None:
        engine = SimulatedEngine(block_size=4, num_blocks=8)
        engine.add("a", list(range(16)))
        engine.add("b", list(range(100, 116)))
        assert new_ids(engine.begin_step()) == ["a"]

    def test_a_request_that_outgrows_the_whole_cache_ends(self) -> None:
        engine = SimulatedEngine(block_size=2, num_blocks=3, max_model_len=1000)
        record = engine.add("a", [1, 2, 3], params=outputs_of(None))
        other = engine.add("b", [4, 5, 6], params=outputs_of(None))
        engine.run()
        for ended in (record, other):
            assert ended.finish_reason == "length"
            assert len(ended.token_ids) == 4


class TestPrefixCache:
    def test_a_full_hit_leaves_one_token_to_compute(self) -> None:
        engine = SimulatedEngine(block_size=4)
        prompt = list(range(9))
        engine.add("a", prompt, params=outputs_of(1))
        engine.run()
        record = engine.add("b", prompt, params=outputs_of(1))
        assert shares(engine.begin_step()) == [("b", 8, 1, True)]
        engine.finish_step()
        assert record.num_cached_tokens == 8
        engine.add("c", prompt[:8], params=outputs_of(1))
        assert shares(engine.begin_step()) == [("c", 4, 4, True)]
        engine.finish_step()
        metrics = engine.scheduler.metrics()
        assert (metrics["prefix_queries"], metrics["prefix_hits"]) == (9 + 9 + 8, 8 + 4)

    def test_copies_that_arrive_together_share_their_prompt(self) -> None:
        engine = SimulatedEngine(block_size=4)
        for request_id in "abc":
            engine.add(request_id, list(range(10)), params=outputs_of(4))
        assert shares(engine.begin_step()) == [("a", 0, 10, True), ("b", 8, 2, True), ("c", 8, 2, True)]
        engine.finish_step()
        assert engine.scheduler.metrics()["blocks_free"] == 16 - 2 - 3
        engine.run()

    def test_a_block_that_a_single_token_completes_is_found_from_the_next_step_on(self) -> None:
        """A step of single tokens may write and read the cache in one kernel."""
        engine = SimulatedEngine(block_size=4, budget=8)
        engine.add("decode", [10])
        prompt = list(range(8))
        engine.add("a", prompt)
        assert shares(engine.begin_step()) == [("decode", 0, 1, True), ("a", 0, 7, False)]
        engine.finish_step()
        engine.add("b", [*prompt, 8])
        assert shares(engine.begin_step()) == [("decode", 1, 1, True), ("a", 7, 1, True), ("b", 4, 5, True)]
        engine.finish_step()
        engine.add("c", [*prompt, 9])
        assert ("c", 8, 1, True) in shares(engine.begin_step())
        engine.finish_step()
        engine.run()

    def test_a_block_that_a_chunk_of_one_token_completes_is_found_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is sampled behind it."""
        monkeypatch.setattr("compiled_engine.features.prompt_logprobs.plan.MOST_PROMPT_LOGPROBS", VOCAB_SIZE)
        engine = SimulatedEngine(block_size=4)
        engine.add("a", list(range(9)), params=outputs_of(1, prompt_logprobs=-1))
        for start in range(4):
            assert shares(engine.begin_step()) == [("a", start, 1, False)]
            engine.finish_step()
        engine.add("b", list(range(9)), params=outputs_of(1))
        assert shares(engine.begin_step())[-1] == ("b", 4, 5, True)
        engine.finish_step()
        engine.run()

    def test_generated_tokens_are_found_by_the_next_turn(self) -> None:
        engine = SimulatedEngine(block_size=4)
        record = engine.add("a", [1, 2, 3], params=outputs_of(10))
        engine.run()
        follow_up = engine.add("b", [1, 2, 3, *record.token_ids, 4, 5])
        engine.run()
        assert follow_up.num_cached_tokens == 12

    def test_cached_tokens_are_those_of_the_first_admission(self) -> None:
        engine = SimulatedEngine(block_size=2, num_blocks=9)
        for request_id in "abc":
            engine.add(request_id, [ord(request_id), 1, 2], params=outputs_of(8))
        engine.run()
        assert engine.num_preemptions > 0
        assert [record.num_cached_tokens for record in engine.ended] == [0, 0, 0]


class TestPromptLogprobs:
    def test_a_step_computes_as_much_of_a_prompt_as_there_is_memory_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The log-probabilities of its tokens are in host memory at once: of each, as many as the vocabulary has."""
        monkeypatch.setattr("compiled_engine.features.prompt_logprobs.plan.MOST_PROMPT_LOGPROBS", 4 * VOCAB_SIZE)
        engine = SimulatedEngine(budget=20)
        engine.add("all", list(range(10)), params=outputs_of(1, prompt_logprobs=-1))
        engine.add("few", list(range(10)), params=outputs_of(1, prompt_logprobs=0))
        steps = []
        while engine.live:
            steps.append(shares(engine.begin_step()))
            engine.finish_step()
        assert [[share for share in step if share[0] == "all"] for step in steps] == [
            [("all", 0, 4, False)], [("all", 4, 4, False)], [("all", 8, 2, True)]
        ]  # fmt: skip
        assert ("few", 0, 10, True) in steps[0]

    def test_chunks_deliver_them_in_pieces(self) -> None:
        engine = SimulatedEngine(budget=4)
        engine.add("a", list(range(10)), params=outputs_of(1, prompt_logprobs=0))
        pieces = []
        while engine.live:
            (output,) = engine.step()
            found = rows_in(output.extras)
            assert found is not None
            first, entries = found
            pieces.append((first, len(entries), len(output.new_token_ids)))
        assert pieces == [(1, 4, 0), (5, 4, 0), (9, 1, 1)]

    def test_they_are_computed_though_the_prompt_is_cached(self) -> None:
        engine = SimulatedEngine()
        engine.add("a", list(range(10)))
        engine.run()
        record = engine.add("b", list(range(10)), params=outputs_of(1, prompt_logprobs=0))
        assert shares(engine.begin_step()) == [("b", 0, 10, True)]
        engine.finish_step()
        assert len(record.prompt_logprobs) == 9

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_a_resumed_request_does_not_deliver_them_again(self, prefix_caching: bool) -> None:
        engine = SimulatedEngine(block_size=2, num_blocks=9, prefix_caching=prefix_caching)
        for request_id in "abc":
            engine.add(request_id, [ord(request_id), 1, 2], params=outputs_of(8, prompt_logprobs=0))
        engine.run()
        assert engine.num_preemptions > 0
        assert [len(record.prompt_logprobs) for record in engine.ended] == [2, 2, 2]

    def test_a_gap_is_an_error(self) -> None:
        engine = SimulatedEngine()
        engine.add("a", [1, 2, 3], params=outputs_of(1, prompt_logprobs=0))
        step = engine.scheduler.schedule()
        assert step is not None
        with pytest.raises(RuntimeError, match="prompt_logprobs of 'a' start at 2, but 1 is next"):
            engine.scheduler.update(
                step, RunnerOutput([1], extras={"prompt_logprobs": {"a": (2, LogprobRows(0, b""))}})
            )


def test_metrics() -> None:
    engine = SimulatedEngine(block_size=4, num_blocks=8, max_num_seqs=1)
    engine.add("a", list(range(6)), params=outputs_of(1))
    engine.add("b", list(range(6)), params=outputs_of(5))
    engine.add("c", list(range(6)))
    engine.step()
    engine.step()
    engine.abort("c")
    assert engine.scheduler.metrics() == {
        "running": 1,
        "waiting": 0,
        "kv_usage": 0.25,
        "kv_usage_peak": 0.25,
        "blocks_total": 8,
        "blocks_free": 6,
        "prefix_queries": 12,
        "prefix_hits": 4,
        "preemptions": 0,
        "finished": 1,
        "aborted": 1,
        "steps": 2,
        "waiting_by_reason": {"feature": 0, "rows": 0, "blocks": 0, "turn": 0},
        "grammar_requests": 0,  # of a feature
    }


def test_a_waiting_request_has_a_reason() -> None:
    """All wait for what the first of them lacks; none is left when it starts."""

    def reasons(engine: SimulatedEngine) -> dict[str, int]:
        return {why: count for why, count in engine.scheduler.metrics()["waiting_by_reason"].items() if count}

    for short, engine in (
        ("rows", SimulatedEngine(block_size=4, num_blocks=8, max_num_seqs=1)),
        ("blocks", SimulatedEngine(block_size=4, num_blocks=3)),
    ):
        for name in "abc":
            engine.add(name, list(range(7)), params=outputs_of(2))
        assert reasons(engine) == {"turn": 3}
        engine.step()
        assert reasons(engine) == {short: 2}
        engine.run()
        assert reasons(engine) == {}


def test_the_peak_of_the_cache_is_that_of_all_steps() -> None:
    engine = SimulatedEngine(block_size=4, num_blocks=8)
    engine.add("a", list(range(14)), params=outputs_of(1))
    engine.run()
    engine.add("b", [1], params=outputs_of(1))
    engine.run()
    assert engine.scheduler.metrics()["kv_usage_peak"] == 0.5
