"""Log-probabilities come with their tokens, whether a request is as all others in its step or not."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import next_step

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineOutput, EngineRequest, RunnerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.features.prompt_logprobs.plan import PromptLogprobs
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs


def rows(*tokens: int) -> LogprobRows:
    return LogprobRows.of([TokenLogprobs((token,), (-float(token),), 1) for token in tokens])


def made(max_new_tokens_per_step: int, **limits: Any) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 60, "policy": "fcfs"} | limits
    cache = CacheConfig(4, None, 0.9, True)
    return Scheduler(
        SchedulerConfig(**given),
        cache,
        40,
        11,
        max_new_tokens_per_step=max_new_tokens_per_step,
        features=[PromptLogprobs(11)],
    )


def add(scheduler: Scheduler, name: str, prompt: int = 3, output: tuple[int, ...] = (), **params: Any) -> None:
    given = SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | params)
    scheduler.add(EngineRequest(name, (1,) * prompt, given, output_token_ids=output))


def update(scheduler: Scheduler, result: RunnerOutput) -> dict[str, EngineOutput]:
    outputs = scheduler.update(next_step(scheduler), result)
    scheduler.check_integrity()
    return {output.request_id: output for output in outputs}


@pytest.mark.parametrize("several", [False, True])
def test_rows_of_requests_that_ask_for_few_or_many(several: bool) -> None:
    """From the second token on requests are as all others; rows of more tokens than most come beside."""
    scheduler = made(3 if several else 1)
    for name, logprobs in (("none", None), ("few", 0), ("many", 9)):
        add(scheduler, name, logprobs=logprobs)
    for number in range(4):
        counts = [2, 1, 2] if several and number else [1, 1, 1]
        tokens = [[5] * counts[0], [6] * counts[1], [7, 8][: counts[2]]]
        every = [token for each in tokens for token in each]
        many = {"many": rows(*(10 * token for token in tokens[2]))}
        result = RunnerOutput(every, rows(*every), many, lengths=counts if several else None)
        found = update(scheduler, result)
        assert [list(found[name].new_token_ids) for name in ("none", "few", "many")] == tokens
        assert found["few"].logprobs == rows(6)
        assert found["many"].logprobs == many["many"]


@pytest.mark.parametrize("max_new_tokens_per_step", [1, 3])
@pytest.mark.parametrize("output", [(), (8, 9)])
def test_rows_of_a_prompt_come_with_its_token_beside_others(
    max_new_tokens_per_step: int, output: tuple[int, ...]
) -> None:
    """Also where another core has generated the first tokens."""
    scheduler = made(max_new_tokens_per_step)
    add(scheduler, "decodes", logprobs=0)
    counts = None if max_new_tokens_per_step == 1 else [1]
    update(scheduler, RunnerOutput([4], rows(4), lengths=counts))
    update(scheduler, RunnerOutput([5], rows(5), lengths=counts))
    add(scheduler, "prompt", output=output, prompt_logprobs=0)
    counts = None if max_new_tokens_per_step == 1 else [1, 1]
    prompt = {"prompt": (1, rows(1, 1))}
    found = update(scheduler, RunnerOutput([6, 7], rows(6, 7), extras={"prompt_logprobs": prompt}, lengths=counts))
    assert (found["decodes"].new_token_ids, found["decodes"].logprobs) == ((6,), rows(6))
    assert (found["prompt"].new_token_ids, rows_in(found["prompt"].extras)) == ((7,), prompt["prompt"])
    assert found["prompt"].logprobs is None


def test_a_request_may_get_no_token_in_a_step() -> None:
    """Its drafts were none of its tokens; nobody hears of it."""
    scheduler = made(3)
    add(scheduler, "a")
    add(scheduler, "b")
    update(scheduler, RunnerOutput([4, 4], lengths=[1, 1]))
    assert update(scheduler, RunnerOutput([5], lengths=[0, 1])).keys() == {"b"}
    found = update(scheduler, RunnerOutput([6, 6, 6, 7], lengths=[3, 1]))
    assert {name: output.new_token_ids for name, output in found.items()} == {"a": (6, 6, 6), "b": (7,)}


def test_drafts_are_no_prompt() -> None:
    """The bound of prompts beside others is for prompts alone: a request near its end has fewer drafts."""
    scheduler = made(4, max_prefill_tokens=4)
    add(scheduler, "a", max_tokens=3)
    add(scheduler, "other")
    update(scheduler, RunnerOutput([4, 4], lengths=[1, 1]))
    add(scheduler, "b", prompt=10)
    step = next_step(scheduler)
    assert dict(zip(step.request_ids, step.counts, strict=True)) == {"a": 2, "other": 4, "b": 4}


def test_a_check_finds_what_nobody_gave_back() -> None:
    scheduler = made(1)
    scheduler.check_idle()
    (held,) = scheduler._kv_cache.groups[0].pool.allocate(1)
    with pytest.raises(RuntimeError, match="no request is left, but only 39 of 40 blocks are free"):
        scheduler.check_idle()
    with pytest.raises(RuntimeError, match=f"block {held} has 1 references, but 0 tables hold it"):
        scheduler.check_integrity()
    add(scheduler, "a")
    scheduler.check_idle()  # it is not idle


@pytest.mark.parametrize("waiting", [0, 2])
def test_who_runs_and_who_waits(waiting: int) -> None:
    scheduler = made(1, max_num_seqs=2)
    for number in range(2 + waiting):
        add(scheduler, str(number))
    next_step(scheduler)
    metrics = scheduler.metrics()
    assert (metrics["running"], metrics["waiting"]) == (2, waiting)
