"""Refusals of a scheduler, and the nearest cases that it accepts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import next_step

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NO_TOKENS, LogprobRows, TokenLogprobs


def bare_scheduler(max_new_tokens_per_step: int = 1, **changes: Any) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 20, "policy": "fcfs"} | changes
    config, cache = SchedulerConfig(**limits), CacheConfig(4, None, 0.9, True)
    most = max_new_tokens_per_step
    features = [DraftPlan(most - 1, 4, 1)] if most > 1 else []
    return Scheduler(config, cache, num_blocks=3, vocab_size=11, max_new_tokens_per_step=most, features=features)


def request_of(num_tokens: int, request_id: str = "a") -> EngineRequest:
    return EngineRequest(request_id, (1,) * num_tokens, SamplingParams())


def test_a_prompt_that_can_never_be_computed_is_refused() -> None:
    bare_scheduler().add(request_of(12))
    with pytest.raises(ValueError, match=r"'a' must have at most the 12 tokens that the KV cache holds, got 13"):
        bare_scheduler().add(request_of(13))
    bare_scheduler(max_model_len=6).add(request_of(5))
    with pytest.raises(ValueError, match=r"'a' must have at most 5 tokens \(max_model_len 6"):
        bare_scheduler(max_model_len=6).add(request_of(6))
    with pytest.raises(ValueError, match="prompt_token_ids of request 'a' must have at least one token"):
        bare_scheduler().add(request_of(0))


def test_a_prompt_that_fills_the_cache_gets_one_token() -> None:
    scheduler = bare_scheduler()
    scheduler.add(request_of(12))
    outputs = []
    while (step := scheduler.schedule()) is not None:
        outputs += scheduler.update(step, RunnerOutput((5,) * sum(step.samples)))
    assert [(output.new_token_ids, output.finish_reason) for output in outputs] == [((5,), "length")]
    scheduler.check_integrity()


def test_an_id_in_use_is_refused() -> None:
    scheduler = bare_scheduler()
    scheduler.add(request_of(3))
    with pytest.raises(ValueError, match="request_id 'a' is already in use"):
        scheduler.add(request_of(3))
    scheduler.schedule()
    with pytest.raises(ValueError, match="request_id 'a' is already in use"):
        scheduler.add(request_of(3))


def test_one_step_at_a_time() -> None:
    scheduler = bare_scheduler()
    scheduler.add(request_of(3))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="step 1 is in flight"):
        scheduler.schedule()
    scheduler.update(step, RunnerOutput([1]))
    with pytest.raises(RuntimeError, match="step 1 is not the oldest one in flight"):
        scheduler.update(step, RunnerOutput([1]))


def test_without_requests_there_is_no_step() -> None:
    assert bare_scheduler().schedule() is None


def test_a_step_yields_no_more_tokens_than_it_may() -> None:
    scheduler = bare_scheduler()
    scheduler.add(request_of(3))
    step = next_step(scheduler)
    with pytest.raises(RuntimeError, match="step 1 yields several tokens for a request; allowed: one"):
        scheduler.update(step, RunnerOutput([1, 2], lengths=[2]))
    scheduler = bare_scheduler(max_new_tokens_per_step=4)
    scheduler.add(request_of(3))
    scheduler.update(next_step(scheduler), RunnerOutput([1], lengths=[1]))
    step = next_step(scheduler)
    with pytest.raises(RuntimeError, match="request 'a' gets 5 tokens; allowed: 0 to 4"):
        scheduler.update(step, RunnerOutput([1] * 5, lengths=[5]))


@pytest.mark.parametrize("why", sorted(NO_TOKENS))
def test_what_comes_before_an_error_is_given_out(why: int) -> None:
    """A row of several tokens may end in a place where there is none."""
    scheduler = bare_scheduler(max_new_tokens_per_step=4)
    scheduler.add(EngineRequest("a", (1, 2), SamplingParams(logprobs=0)))
    rows = LogprobRows.of([TokenLogprobs((token,), (-1.0,), 1) for token in range(4)])
    for tokens in ([1], [2, 3, why, 4]):
        result = RunnerOutput(tokens, rows.select(slice(len(tokens))), lengths=[len(tokens)])
        (output,) = scheduler.update(next_step(scheduler), result)
    assert (output.new_token_ids, output.finish_reason) == ((2, 3), "error")
    assert output.logprobs == rows.select(slice(2))
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


def test_each_output_says_how_many_drafts_its_step_verified() -> None:
    """Also the first one and the last, which are not as all others."""
    scheduler = bare_scheduler(max_new_tokens_per_step=4)
    scheduler.add(EngineRequest("a", (1, 2), SamplingParams(max_tokens=7, ignore_eos=True)))
    for count, num_drafts in ((1, 0), (2, 3), (2, 3), (2, 1)):
        result = RunnerOutput([3] * count, lengths=[count], columns={VERIFIED_DRAFTS: [(num_drafts, count - 1)]})
        (output,) = scheduler.update(next_step(scheduler), result)
        assert output.new_token_ids == (3,) * count
        assert output.extras == {VERIFIED_DRAFTS: (num_drafts, count - 1)}
    assert output.finish_reason == "length"
    metrics = scheduler.metrics()
    assert [metrics[name] for name in ("drafted_requests", "draft_tokens", "accepted_tokens")] == [3, 7, 3]


@pytest.mark.parametrize(("tokens", "kept"), [([5, 6, 7, 8], 2), ([5, 6], 2), ([6], 1)])
def test_drafts_behind_a_stop_token_are_no_output(tokens: list[int], kept: int) -> None:
    """The output still says how many drafts were right: the frontend counts those that are part of it."""
    scheduler = bare_scheduler(max_new_tokens_per_step=4)
    scheduler.add(EngineRequest("a", (1, 2), SamplingParams(stop_token_ids=[6])))
    scheduler.update(next_step(scheduler), RunnerOutput([1], lengths=[1]))
    result = RunnerOutput(tokens, lengths=[len(tokens)], columns={VERIFIED_DRAFTS: [(3, len(tokens) - 1)]})
    (output,) = scheduler.update(next_step(scheduler), result)
    assert (output.new_token_ids, output.finish_reason) == (tuple(tokens[:kept]), "stop")
    assert output.extras == {VERIFIED_DRAFTS: (3, len(tokens) - 1)}
