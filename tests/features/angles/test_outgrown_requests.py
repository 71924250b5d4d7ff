"""Requests that outgrow their angles are computed again, whatever else the scheduler does; no key has other angles."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from fake_runner import VOCAB_SIZE, FakeRunner

from compiled_engine.config import CacheConfig, LengthAngles, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.angles.plan import AnglesByLength
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.sampling.params import SamplingParams

MAX_LEN = 40


def run_all(seed: int) -> list[tuple[EngineRequest, list[int]]]:
    """Run random requests to their ends, and return them with their tokens. FakeRunner checks each step."""
    rng = random.Random(seed)
    border, block_size, most = rng.randint(1, 24), rng.randint(1, 5), rng.choice([1, 1, 2, 4])
    steps_in_flight, max_num_seqs = rng.choice([1, 2, 3]), rng.randint(1, 5)
    num_blocks = -(-MAX_LEN // block_size) + rng.randint(1, 20)
    budget = rng.randint(most, 30)
    config = SchedulerConfig(max_num_seqs, budget, MAX_LEN, "fcfs")
    features: list[PlanFeature] = [AnglesByLength(LengthAngles(border, recomputes=True))]
    if most > 1:
        features.append(DraftPlan(most - 1, max_num_seqs, steps_in_flight))
    scheduler = Scheduler(
        config,
        CacheConfig(block_size, None, 0.9, enable_prefix_caching=rng.random() < 0.8),
        num_blocks,
        VOCAB_SIZE,
        steps_in_flight,
        most,
        features=features,
    )
    runner = FakeRunner(
        *(num_blocks, block_size, max_num_seqs, budget, False, most),
        yields=lambda count: rng.randint(0, count),
        border=border,
    )
    texts = [[rng.randrange(4) for _ in range(MAX_LEN)] for _ in range(2)]
    waiting = []
    for number in range(12):
        prompt, output = rng.randint(1, MAX_LEN - 2), rng.randint(1, 30)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        waiting.append(EngineRequest(f"r{number}", tuple(rng.choice(texts)[:prompt]), params))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    added, in_flight = [], deque[Any]()
    for _ in range(3000):
        if waiting and rng.random() < 0.3:
            added.append(waiting.pop())
            scheduler.add(added[-1])
        if len(in_flight) < steps_in_flight and (step := scheduler.schedule()) is not None:
            in_flight.append((step, runner.execute(step)))
            if rng.random() < 0.5:
                continue
        if in_flight:
            outputs = scheduler.update(*in_flight.popleft())
            for got in outputs:
                tokens[got.request_id] += got.new_token_ids
        scheduler.check_integrity()
        if not (waiting or scheduler.has_unfinished()):
            scheduler.check_idle()
            return [(request, tokens[request.request_id]) for request in added]
    raise AssertionError("requests have not ended")


@pytest.mark.parametrize("seed", range(60))
def test_requests_end_and_their_keys_have_their_angles(seed: int) -> None:
    for request, found in run_all(seed):
        room = MAX_LEN - len(request.prompt_token_ids)
        assert len(found) == min(request.sampling_params.max_tokens or room, room)


def made(length: int, angles: LengthAngles) -> Request:
    request = Request.of(EngineRequest("r", tuple(range(length)), SamplingParams()), (0, 0), 100)
    AnglesByLength(angles).added(request)
    return request


def test_prompts_beyond_the_border_share_blocks_only_with_those_of_their_length() -> None:
    """Frequencies of dynamic angles depend on the length; LongRoPE has two sets of them."""
    dynamic = LengthAngles(8, recomputes=False)
    roots = [made(length, dynamic).prefix_root for length in (3, 8, 9, 9, 10)]
    assert roots[0] == roots[1]
    assert roots[2] == roots[3]
    assert len(set(roots)) == 3
    longrope = LengthAngles(8, recomputes=True)
    requests = [made(length, longrope) for length in (3, 9, 10)]
    for request in requests[1:]:
        assert request.num_tokens > request.outgrown_at
        AnglesByLength(longrope).outgrown(request)
        assert request.num_tokens <= request.outgrown_at
    assert requests[0].prefix_root == roots[0]
    assert requests[1].prefix_root == requests[2].prefix_root != roots[0]
