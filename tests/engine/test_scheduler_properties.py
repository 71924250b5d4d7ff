"""Random work for the scheduler: whatever comes, everything that SimulatedEngine checks holds, and all ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_runner import VOCAB_SIZE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lagging_copies import LaggingCopies
from scripted_drafts import AnyLength
from simulated_engine import SimulatedEngine, outputs_of
from token_masks import ByLastToken

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features.kv_offload.plan import HostBlocks
from compiled_engine.features.recurrence.snapshots import StateSnapshots
from compiled_engine.sampling.params import SamplingParams

# Steps in flight and micro-batches: a lone stage, then pipelines, each without and with scheduling ahead.
MICRO_BATCHES = [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3)]
IDS = [f"r{i}" for i in range(12)]
TOKENS = st.integers(0, 10)
MASKS = [ByLastToken(VOCAB_SIZE), ByLastToken(VOCAB_SIZE, 2), ByLastToken(VOCAB_SIZE, 0, "allows nothing")]

sampling_params = st.builds(
    lambda min_tokens, more, **rest: SamplingParams(
        min_tokens=min_tokens, max_tokens=None if more is None else min_tokens + more, **rest
    ),
    min_tokens=st.sampled_from([0, 0, 0, 3]),
    more=st.sampled_from([None, 1, 2, 7, 20]),
    stop_token_ids=st.sampled_from([(), (), (3,), (1, 5)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    token_mask=st.sampled_from([None, None, None, *MASKS]),
)


def yields_of(seed: int) -> Callable[[int], int]:
    """How many tokens of the most that there may be a request gets: any number, and often all."""
    rng = random.Random(seed)
    return lambda most: rng.choice([*range(most + 1), most])


def draft_length_of(max_new_tokens_per_step: int, skips_head: bool) -> AnyLength | None:
    """Steps with any number of drafts, where the drafts are those of a head, which rests at times."""
    return (
        AnyLength(max_new_tokens_per_step - 1, skips_head=True) if skips_head and max_new_tokens_per_step > 1 else None
    )


def with_host_blocks(num_slots: int, seed: int, snapshots: StateSnapshots | None) -> dict[str, Any]:
    """Further arguments of an engine whose evicted blocks come back from host memory, late; 0: they do not."""
    if not num_slots:
        return {}
    copies = LaggingCopies(random.Random(seed))
    slots: dict[str, Any] = {"snapshots": snapshots, "num_state_slots": max(1, num_slots // 4)}
    return {"copies": copies, "further": [HostBlocks(num_slots, copies.call, **slots, least_tokens=1, together=1)]}


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and fail at every moment, in flight too; ids and prompts are used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SimulatedEngine()
        self.prompts: list[list[int]] = [[0]]

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(2, 14),
        budget=st.integers(1, 24),
        max_prefill_tokens=st.sampled_from([None, None, 1, 2, 7]),
        max_num_seqs=st.integers(1, 6),
        max_model_len=st.integers(4, 50),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        micro_batches=st.sampled_from(MICRO_BATCHES),
        max_new_tokens_per_step=st.sampled_from([1, 1, 2, 4]),
        num_snapshots=st.sampled_from([0, 0, 1, 2, 20]),
        skips_head=st.booleans(),
        host_slots=st.sampled_from([0, 0, 1, 4, 60]),
        seed=st.integers(0, 99),
    )
    def start(
        self,
        micro_batches: tuple[int, int],
        budget: int,
        max_new_tokens_per_step: int,
        num_snapshots: int,
        skips_head: bool,
        host_slots: int,
        seed: int,
        block_size: int,
        prefix_caching: bool,
        **limits: int | str | bool | None,
    ) -> None:
        steps_in_flight, num_micro_batches = micro_batches
        has_snapshots = num_snapshots and prefix_caching
        snapshots = StateSnapshots(num_snapshots, block_size, least_gain=1) if has_snapshots else None
        self.engine = SimulatedEngine(
            steps_in_flight=steps_in_flight,
            num_micro_batches=num_micro_batches,
            budget=max(budget, max_new_tokens_per_step),
            max_new_tokens_per_step=max_new_tokens_per_step,
            yields=yields_of(seed),
            block_size=block_size,
            prefix_caching=prefix_caching,
            snapshots=snapshots,
            draft_length=draft_length_of(max_new_tokens_per_step, skips_head),
            **with_host_blocks(host_slots, seed, snapshots),
            **limits,  # type: ignore[arg-type]
        )

    def free_ids(self) -> list[str]:
        return [i for i in IDS if i not in self.engine.live]

    def add_one(self, prompt: list[int], **rest: object) -> None:
        if self.free_ids() and len(prompt) <= self.engine.longest_prompt:
            self.prompts.append(prompt)
            self.engine.add(self.free_ids()[0], prompt, eos=frozenset({7}), **rest)  # type: ignore[arg-type]

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=20), params=sampling_params, priority=st.integers(0, 3))
    def add(self, prompt: list[int], params: SamplingParams, priority: int) -> None:
        self.add_one(prompt, params=params, priority=priority)

    @rule(
        data=st.data(),
        kept=st.integers(1, 40),
        suffix=st.lists(TOKENS, max_size=6),
        copies=st.integers(1, 4),
        params=sampling_params,
        priority=st.integers(0, 3),
    )
    def add_related(
        self,
        data: st.DataObject,
        kept: int,
        suffix: list[int],
        copies: int,
        params: SamplingParams,
        priority: int,
    ) -> None:
        """Copies of a prompt that starts like an earlier one, its output included where it has ended."""
        finished = [[*r.request.prompt_token_ids, *r.token_ids] for r in self.engine.ended]
        earlier = data.draw(st.sampled_from(self.prompts + finished))
        for _ in range(copies):
            self.add_one(earlier[:kept] + suffix, params=params, priority=priority)

    @rule(request_id=st.sampled_from(IDS))
    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.steps_in_flight)
    @rule()
    def begin_step(self) -> None:
        self.engine.try_step()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def finish_step(self) -> None:
        self.engine.finish_step()

    @precondition(lambda self: self.engine.in_flight)
    @rule(launching=st.booleans())
    def fail_step(self, launching: bool) -> None:
        self.engine.fail_step(launching=launching)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @invariant()
    def counts_agree(self) -> None:
        metrics = self.engine.scheduler.metrics()
        assert metrics["running"] + metrics["waiting"] == len(self.engine.live)
        assert self.engine.scheduler.has_unfinished() == bool(self.engine.live)
        assert 0 <= metrics["prefix_hits"] <= metrics["prefix_queries"]

    def teardown(self) -> None:
        self.engine.run()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize(("steps_in_flight", "num_micro_batches"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("max_new_tokens_per_step", [1, 4])
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.product(one_in=1000)) for part in range(1, 4))]
)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_a_heavy_load_is_served_in_full(
    policy: str, steps_in_flight: int, num_micro_batches: int, max_new_tokens_per_step: int, part: int, seed: int
) -> None:
    """Dozens of requests over shared prefixes, in pools from ample to so small that most are preempted."""
    seed ^= part << 33  # other loads in each part
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8, 16])
    with_masks, prefix_caching = rng.random() < 0.7, rng.random() < 0.8
    num_snapshots = rng.choice([0, 1, 3, 40]) if prefix_caching else 0
    snapshots = StateSnapshots(num_snapshots, block_size, least_gain=1) if num_snapshots else None
    engine = SimulatedEngine(
        block_size=block_size,
        num_blocks=rng.choice([60, 100, 200, 1000]) // block_size,
        budget=max(rng.choice([1, 3, 16, 100]), max_new_tokens_per_step),
        max_num_seqs=rng.choice([1, 4, 32]),
        max_model_len=rng.choice([40, 80]),
        policy=policy,
        prefix_caching=prefix_caching,
        steps_in_flight=steps_in_flight,
        num_micro_batches=num_micro_batches,
        max_new_tokens_per_step=max_new_tokens_per_step,
        yields=yields_of(seed),
        snapshots=snapshots,
        draft_length=draft_length_of(max_new_tokens_per_step, rng.random() < 0.5),
        **with_host_blocks(rng.choice([0, 5, 100]), seed, snapshots),
    )
    roots = [[rng.randrange(11) for _ in range(30)] for _ in range(3)]
    for i in range(60):
        prompt = rng.choice(roots)[: rng.randrange(31)] + [rng.randrange(11) for _ in range(rng.randrange(1, 8))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 30, None]),
            stop_token_ids=rng.choice([(), (4,)]),
            prompt_logprobs=rng.choice([None] * 7 + [0]),
            token_mask=rng.choice([None] * 3 + [MASKS[0]] * 2 + MASKS) if with_masks else None,
        )
        engine.add(f"r{i}", prompt, priority=rng.randrange(3), params=params)
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            engine.try_step()
            if rng.random() < 0.1:
                engine.abort(f"r{rng.randrange(i + 1)}")
            if len(engine.in_flight) == steps_in_flight or rng.random() < 0.1:
                engine.step()
    engine.run()


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    block_size=st.integers(1, 4),
    budget=st.integers(2, 10),
    num_decodes=st.integers(0, 2),
    length=st.integers(1, 24),
    steps_before=st.integers(0, 4),
    max_new_tokens_per_step=st.integers(1, 3),
)
def test_prompts_that_go_on_after_one_that_is_being_computed(
    micro_batches: tuple[int, int],
    block_size: int,
    budget: int,
    num_decodes: int,
    length: int,
    steps_before: int,
    max_new_tokens_per_step: int,
) -> None:
    """The budget may leave the first prompt as many tokens as a decode has, which complete a block in the step that
    admits others."""
    steps_in_flight, num_micro_batches = micro_batches
    engine = SimulatedEngine(
        block_size=block_size,
        num_blocks=64,
        budget=max(budget, max_new_tokens_per_step),
        steps_in_flight=steps_in_flight,
        num_micro_batches=num_micro_batches,
        max_new_tokens_per_step=max_new_tokens_per_step,
    )
    for i in range(num_decodes):
        engine.add(f"decode {i}", [i], params=outputs_of(12))
    prompt = [token % VOCAB_SIZE for token in range(length)]
    engine.add("first", prompt, params=outputs_of(2))
    for _ in range(steps_before):
        if len(engine.in_flight) == steps_in_flight:
            engine.finish_step()
        engine.try_step()
    for i in range(3):
        engine.add(f"longer {i}", [*prompt, *[i] * max_new_tokens_per_step], params=outputs_of(2))
    engine.run()


def test_a_block_is_found_though_its_last_token_was_computed_before_it_was_known() -> None:
    """Scheduling ahead computes tokens that are not known yet: their block is registered once they are."""
    engine = SimulatedEngine(steps_in_flight=2, num_blocks=32)
    first = engine.add("first", [1, 2, 3], params=outputs_of(13))
    engine.run()
    again = engine.add("again", [1, 2, 3, *first.token_ids, 5], params=outputs_of(1))
    engine.run()
    assert again.num_cached_tokens == 12  # of 15 that were computed, in blocks of 4


def test_of_a_request_that_goes_on_elsewhere_prompt_tokens_count_as_hits() -> None:
    engine = SimulatedEngine(num_blocks=32)
    first = engine.add("first", [1, 2, 3, 4, 5], params=outputs_of(12))
    engine.run()
    before = engine.scheduler.metrics()
    rest = EngineRequest("rest", (1, 2, 3, 4, 5), outputs_of(14), output_token_ids=tuple(first.token_ids))
    engine.scheduler.add(rest)
    engine.scheduler.schedule()
    after = engine.scheduler.metrics()
    assert [after[name] - before[name] for name in ("prefix_queries", "prefix_hits")] == [5, 5]
