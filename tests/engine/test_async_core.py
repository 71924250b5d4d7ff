"""The engine core's pipeline: a step is launched before the result of the one before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_runner import FakeRunner
from msgspec import structs

from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.messages import ControlCall, EngineRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.request import Request
from compiled_engine.features.registry import plan_features
from compiled_engine.options import EngineOptions
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

NUM_BLOCKS = 12


@dataclass
class FakePending:
    executor: FakeExecutor
    step: int
    output: RunnerOutput

    def result(self) -> RunnerOutput:
        self.executor.events.append(("result", self.step))
        if self.step == self.executor.failing_result:
            raise MemoryError("injected")
        return self.output


class FakeExecutor:
    """FakeRunner behind an executor; `events` says in which order steps were submitted and results taken."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.cache.num_blocks is not None
        scheduler = config.scheduler
        self.num_blocks = config.cache.num_blocks
        self.runner = FakeRunner(
            self.num_blocks, config.cache.block_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        )
        self.events: list[tuple[str, int]] = []
        self.failing_submit = self.failing_result = -1

    def submit(self, step: SchedulerOutput) -> FakePending:
        self.events.append(("submit", step.step))
        if step.step == self.failing_submit:
            raise MemoryError("injected")
        return FakePending(self, step.step, self.runner.execute(step))

    def call(self, call: ControlCall) -> list[Any]:
        raise AssertionError(call)

    def metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.events.append(("close", 0))


@pytest.fixture
def config() -> EngineConfig:
    return resolve(
        EngineOptions(
            device="cpu",
            mode="eager",
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=64,
            block_size=4,
            num_blocks=NUM_BLOCKS,
        )
    )


def make_core(config: EngineConfig, *, pipelined: bool = True) -> tuple[EngineCore, FakeExecutor]:
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=pipelined))
    executor = FakeExecutor(config)
    return EngineCore(config, executor, StepClock(config.device), features=plan_features(config, executor)), executor


def request(request_id: str, max_tokens: int, **params: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return EngineRequest(request_id, (ord(request_id), 1, 2), sampling)


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        core.check_integrity()
    return tokens


def test_the_next_step_is_submitted_before_a_result_is_taken(config: EngineConfig) -> None:
    core, executor = make_core(config)
    core.add(request("a", 3))
    run(core)
    assert executor.events == [
        ("submit", 1),
        ("submit", 2),
        ("result", 1),
        ("submit", 3),
        ("result", 2),
        ("result", 3),  # the length is foreseen: no fourth step
    ]


def test_without_it_steps_follow_one_another(config: EngineConfig) -> None:
    core, executor = make_core(config, pipelined=False)
    core.add(request("a", 2))
    run(core)
    assert executor.events == [("submit", 1), ("result", 1), ("submit", 2), ("result", 2)]


def test_the_tokens_are_the_same(config: EngineConfig) -> None:
    """Also with preemptions: twelve blocks of four hold two of the eight requests to their end."""
    results = []
    for pipelined in (False, True):
        core, _ = make_core(config, pipelined=pipelined)
        for i, request_id in enumerate("abcdefgh"):
            core.add(request(request_id, 14 + i, stop_token_ids=[3] if i % 2 else []))
        results.append(run(core))
        assert core.metrics()["preemptions"] > 0
        assert core.metrics()["finished"] == 8
    assert results[0] == results[1]


def test_a_step_left_behind_is_taken_in_by_a_later_one_or_by_close(config: EngineConfig) -> None:
    core, executor = make_core(config)
    core.add(request("a", 9, stop_token_ids=list(range(11))))
    (output,) = core.step()
    assert output.finish_reason == "stop"
    assert not core.has_unfinished()
    assert core.metrics()["blocks_free"] == NUM_BLOCKS
    core.add(request("b", 9, stop_token_ids=list(range(11))))
    assert not core.step()
    (output,) = core.step()
    assert output.request_id == "b"
    core.close()
    submitted, taken = ([step for event, step in executor.events if event == name] for name in ("submit", "result"))
    assert taken == submitted
    assert executor.events[-1] == ("close", 0)
    assert not core.step()


@pytest.mark.parametrize("where", ["submit", "result"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_failure_ends_the_requests_in_flight_and_no_others(where: str, number: int, config: EngineConfig) -> None:
    core, executor = make_core(config)
    setattr(executor, f"failing_{where}", number)
    for request_id in "abcdef":
        core.add(request(request_id, 9))
    with pytest.raises(MemoryError, match="injected"):
        run(core)
    core.check_integrity()
    executor.runner.failed = True
    executor.failing_submit = executor.failing_result = -1
    submitted = {step for event, step in executor.events if event == "submit"} - {number}
    assert {step for event, step in executor.events if event == "result"} >= submitted
    tokens = run(core)
    assert {request_id: len(ids) for request_id, ids in tokens.items()} == {"e": 9, "f": 9}
    assert core.metrics()["blocks_free"] == NUM_BLOCKS


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_that_cannot_be_scheduled_ends_those_that_were_to_have_a_share(
    number: int, pipelined: bool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, executor = make_core(config, pipelined=pipelined)
    for request_id in "ab":
        core.add(request(request_id, 9))
    for _ in range(number - 1):
        core.step()
    core.add(structs.replace(request("c", 9), prompt_token_ids=(3,) * config.cache.block_size))  # it fills a block
    core.add(request("d", 9))

    def fail(kv_cache: KVCacheManager, failing: Request) -> None:
        if failing.request_id == "c":
            raise MemoryError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(KVCacheManager, "register", fail)
        with pytest.raises(MemoryError, match="injected"):
            core.step()
    core.check_integrity()
    executor.runner.failed = True
    assert run(core).keys() == {"d"}
    assert core.metrics()["blocks_free"] == NUM_BLOCKS


def test_a_real_runner_gives_the_same_tokens(config: EngineConfig) -> None:
    results = []
    for pipelined in (False, True):
        scheduler = replace(config.scheduler, async_scheduling=pipelined)
        core = start_core(replace(config, scheduler=scheduler), SilentProgress())
        for i, request_id in enumerate("abcdef"):
            core.add(request(request_id, 10 + i, temperature=0.8, seed=i, logprobs=1, prompt_logprobs=1))
        results.append(run(core))
        core.close()
    assert results[0] == results[1]
    assert [len(ids) for _, ids in sorted(results[0].items())] == [10, 11, 12, 13, 14, 15]
