"""Requests that get vectors: they end with their prompt, and an encoder's prompts are never divided."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.pooling.extras import Vectors, extras_of, vectors_in
from compiled_engine.features.pooling.plan import PoolingPlan
from compiled_engine.sampling.params import SamplingParams


def made(*, whole: bool, budget: int = 10, max_num_seqs: int = 4) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, max_model_len=20, policy="fcfs")
    blocks = 0 if whole else 16
    return Scheduler(
        config,
        CacheConfig(4, None, 0.9, not whole),
        blocks,
        11,
        yields_tokens=False,
        whole=whole,
        features=[PoolingPlan()],
    )


def add(
    scheduler: Scheduler, name: str, length: int, *, by_token: bool = False, second_text: int | None = None
) -> None:
    params = SamplingParams(max_tokens=1, seed=0)
    extras = extras_of(by_token=by_token, second_text=second_text)
    scheduler.add(EngineRequest(name, tuple(range(length)), params, extras=extras))


def run(scheduler: Scheduler) -> tuple[SchedulerOutput, dict[str, Any]]:
    """A step, and the vectors that came of it, with why their requests ended."""
    step = scheduler.schedule()
    assert step is not None
    vectors = {
        name: Vectors(start, 1, bytes(4 * count) if name.startswith("t") else bytes(4))
        for name, start, count, samples in zip(step.request_ids, step.starts, step.counts, step.samples, strict=True)
        if samples or name.startswith("t")
    }
    extras = {"pooling": {name: list(structs.astuple(each)) for name, each in vectors.items()}}  # as they are sent
    outputs = scheduler.update(step, RunnerOutput([0] * sum(step.samples), extras=extras))
    scheduler.check_integrity()
    assert all(not output.new_token_ids for output in outputs)
    return step, {output.request_id: (vectors_in(output.extras), output.finish_reason) for output in outputs}


def test_an_encoder_computes_whole_texts() -> None:
    """One that does not fit into what a step has left waits for the next, and those behind it too."""
    scheduler = made(whole=True)
    for name, length in (("a", 4), ("b", 6), ("c", 7), ("d", 4), ("e", 1)):
        add(scheduler, name, length)
    assert [run(scheduler)[0].counts for _ in range(3)] == [[4, 6], [7], [1, 4]]
    assert not scheduler.has_unfinished()
    scheduler.check_idle()
    metrics = scheduler.metrics()
    assert (metrics["blocks_total"], metrics["kv_usage"], metrics["kv_usage_peak"]) == (0, 0.0, 0.0)
    assert (metrics["finished"], metrics["preemptions"]) == (5, 0)


def test_an_encoders_text_fits_into_a_step() -> None:
    scheduler = made(whole=True)
    add(scheduler, "a", 10)
    with pytest.raises(ValueError, match="must have at most 10 tokens"):
        add(scheduler, "b", 11)
    add(made(whole=True, budget=30), "a", 20)


def test_a_text_is_as_long_as_the_model_takes() -> None:
    """A text has no output, so no token is reserved for it."""
    scheduler = made(whole=False)
    add(scheduler, "a", 20)
    with pytest.raises(ValueError, match="must have at most 20 tokens"):
        add(scheduler, "b", 21)
    steps = [run(scheduler) for _ in range(2)]
    assert [step.counts for step, _ in steps] == [[10], [10]]
    assert steps[0][1] == {}
    assert steps[1][1] == {"a": (Vectors(10, 1, bytes(4)), "length")}


def test_each_chunk_gives_the_vectors_of_its_tokens() -> None:
    """Cached blocks spare nothing of it: their tokens are to have vectors too."""
    scheduler = made(whole=False)
    for _ in range(2):
        add(scheduler, "t", 12, by_token=True)
        chunks = [run(scheduler)[1]["t"] for _ in range(2)]
        assert chunks == [(Vectors(0, 1, bytes(40)), None), (Vectors(10, 1, bytes(8)), "length")]
    add(scheduler, "s", 12)
    assert run(scheduler)[0].starts == [8]


def test_the_runner_hears_what_a_text_is() -> None:
    scheduler = made(whole=False)
    add(scheduler, "t", 2, by_token=True, second_text=1)
    add(scheduler, "s", 2)
    step = scheduler.schedule()
    assert step is not None
    assert [new.extras for new in step.new] == [{"pooling": True, "token_types": 1}, {}]


def test_the_rows_of_vectors() -> None:
    assert [Vectors(0, width, bytes(48)).num_rows for width in (1, 3, 12)] == [12, 4, 1]
