"""The number of drafts in an engine whose host works a step ahead of the device: it is the best of steps in a row."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from compiled_engine.config import CacheConfig, SchedulerConfig, draft_lengths
from compiled_engine.engine.messages import EngineRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.speculation.draft_length import LEAST_STEPS, DraftLength
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.sampling.params import SamplingParams

MOST, REQUESTS, OUTPUT_LEN = 4, 8, 256


@dataclass
class Engine:
    """Milliseconds by a clock of its own. A step takes the host `launch`, and `rows` more unless it has the requests
    and numbers of tokens of the step launched before, and `token` for each token that comes of it; the device `base`,
    and `draft` for each draft of a request. Each draft is right with this share. held_up: of the results of steps, this
    share comes 50 ms late."""

    length: DraftLength
    launch: float = 0.1
    rows: float = 0.3
    token: float = 0.0
    base: float = 0.5
    draft: float = 0.05
    share: float = 0.8
    held_up: float = 0.0
    steps_in_flight: int = 2
    now: float = 0.0
    device: float = 0.0
    tokens: int = 0
    pending: deque[tuple[SchedulerOutput, float]] = field(default_factory=deque)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        config = SchedulerConfig(REQUESTS, 1024, 1024, "fcfs")
        cache = CacheConfig(16, None, 0.9, True)
        in_flight = self.steps_in_flight
        plan = DraftPlan(MOST, REQUESTS, in_flight, length=self.length)
        self.scheduler = Scheduler(config, cache, 1024, 99, in_flight, 1 + MOST, features=[plan])
        self.launched: tuple[list[str], list[int]] | None = None
        self.numbers: list[int] = []
        self.added = 0

    def perf_counter(self) -> float:
        return self.now / 1e3

    def batch(self) -> None:
        """Run as many requests as may run at a time, together until the last one ends."""
        for _ in range(REQUESTS):
            self.added += 1
            prompt = tuple(self.draw.randrange(99) for _ in range(9))
            params = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
            self.scheduler.add(EngineRequest(str(self.added), prompt, params))
        while self.scheduler.has_unfinished():
            while len(self.pending) < self.steps_in_flight and (step := self.scheduler.schedule()) is not None:
                self._launch(step)
            self._take()

    def _launch(self, step: SchedulerOutput) -> None:
        rows = step.request_ids, step.counts
        self.now += self.launch + self.rows * (rows != self.launched)
        self.launched = rows
        if len(step.counts) == REQUESTS and not step.new:
            self.numbers.append(max(step.counts) - 1)
        self.device = max(self.device, self.now) + self.base + self.draft * (max(step.counts) - 1)
        self.pending.append((step, self.device))

    def _take(self) -> None:
        step, done = self.pending.popleft()
        self.now = max(self.now, done + 50 * (self.draw.random() < self.held_up))
        counts = []
        for start, count in zip(step.starts, step.counts, strict=True):
            drafts = count - 1 if start else 0
            counts.append(1 + next((i for i in range(drafts) if self.draw.random() >= self.share), drafts))
        drafts = [(most - 1, count - 1) for most, count in zip(step.counts, counts, strict=True)]
        result = RunnerOutput([3] * sum(counts), lengths=counts, columns={VERIFIED_DRAFTS: drafts})
        outputs = self.scheduler.update(step, result)
        new = sum(len(output.new_token_ids) for output in outputs)
        self.tokens += new
        self.now += self.token * new

    def run(self, num_batches: int) -> list[int]:
        """The numbers of drafts of the steps of all requests."""
        self.numbers.clear()
        for _ in range(num_batches):
            self.batch()
        return self.numbers

    def rate(self, number: int) -> float:
        """Tokens in a millisecond, of steps of this number in a row that nothing holds up."""
        tokens = REQUESTS * sum(self.share**position for position in range(number + 1))
        host, device = self.launch + self.token * tokens, self.base + self.draft * number
        return tokens / (max(host, device) if self.steps_in_flight > 1 else host + device)


ENGINES: dict[str, dict[str, float]] = {
    "device": {},
    "device with dear drafts": {"draft": 0.5},
    "host": {"launch": 0.3, "base": 0.05, "draft": 0.01, "token": 0.01},
    "host that makes rows slowly": {"launch": 0.3, "base": 0.05, "draft": 0.01, "token": 0.01, "rows": 2.0},
    "step by step": {"steps_in_flight": 1, "rows": 0.5},
    "held up": {"held_up": 0.01},
}
Make = Callable[..., Engine]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(length: DraftLength, kind: str, share: float) -> Engine:
        engine = Engine(length, share=share, **ENGINES[kind])  # type: ignore[arg-type]
        clock = SimpleNamespace(perf_counter=engine.perf_counter)
        monkeypatch.setattr("compiled_engine.features.speculation.draft_plan.time", clock)
        return engine

    return make


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_number_that_is_best_in_a_row_is_found_and_kept(kind: str, share: float, made: Make) -> None:
    """Or one that is nearly as good. The rest are probes, and there are few."""
    engine = made(DraftLength(MOST), kind, share)
    engine.run(2)
    numbers = engine.run(4)
    rates = {number: engine.rate(number) for number in draft_lengths(MOST)}
    good = [number for number, rate in rates.items() if rate > 0.94 * max(rates.values())]
    assert sum(number in good for number in numbers) >= 0.96 * len(numbers)


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_time_that_was_wrong_does_not_last(factor: float, made: Make) -> None:
    """Steps of most drafts, which would pay, were measured as if they took longer; all others were measured well."""
    length = DraftLength(MOST)
    engine = made(length, "device", 0.97)
    for number in draft_lengths(MOST):
        milliseconds = (engine.base + engine.draft * number) * (factor if number == MOST else 1)
        for _ in range(LEAST_STEPS):
            length.took(REQUESTS, number, 1e-3 * milliseconds)
    assert engine.run(1).count(MOST) < 10
    engine.run(12)
    numbers = engine.run(1)
    assert numbers.count(MOST) > 0.9 * len(numbers)


def test_a_number_that_yields_a_sixth_more_is_measured_again(made: Make) -> None:
    """Its steps were held up for a while; all numbers have nearly the same times, so that no other bound is wrong."""
    length = DraftLength(MOST)
    engine = made(length, "host", 0.6)
    engine.launch, engine.token, engine.base, engine.draft = 0.31, 0.0, 0.1, 0.005
    assert 1.1 < engine.rate(4) / engine.rate(2) < 1.25
    for number in draft_lengths(MOST):
        for _ in range(LEAST_STEPS):
            length.took(REQUESTS, number, 1e-3 * engine.launch * (1.4 if number == MOST else 1))
    assert engine.run(1).count(MOST) < 20
    engine.run(6)
    numbers = engine.run(1)
    assert numbers.count(MOST) > 0.9 * len(numbers)


@pytest.mark.parametrize(("share", "draft"), [(0.0, 0.05), (0.5, 0.5), (0.8, 1.0)])
def test_probes_and_what_is_measured_again_take_few_steps(share: float, draft: float, made: Make) -> None:
    """Drafts do not pay. One step in 64 has some, and where they seem to promise something, three in 192; or fewer."""
    engine = made(DraftLength(MOST), "device", share)
    engine.draft = draft
    engine.run(2)
    numbers = engine.run(12)
    probes = [number for number in numbers if number]
    assert probes
    assert len(probes) <= len(numbers) / 64 + 4
    without, lost = engine.base * len(numbers), sum(engine.draft * number for number in probes)
    assert lost <= 0.02 * without
