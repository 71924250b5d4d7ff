"""The engine core between its callers and its executor: what it refuses, what it passes on, what it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from plain_config import BASE
from token_masks import ByLastToken

from compiled_engine.config import AdapterConfig, EngineConfig, Recurrences, RowState, SpeculationConfig
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import (
    NO_CACHE,
    ControlCall,
    EngineOutput,
    EngineRequest,
    LateInputs,
    RunnerOutput,
    SchedulerOutput,
)
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.features.adapters.extras import AdapterRef, extras_of
from compiled_engine.features.registry import plan_features
from compiled_engine.features.speculation.draft_sharpness import sharpness_of
from compiled_engine.features.structured.extras import extras_of as grammar_extras
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_mask import MaskConstraint

WITH_ADAPTERS = replace(BASE, adapters=AdapterConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=1))


@dataclass
class Pending:
    output: Callable[[], RunnerOutput]

    def result(self) -> RunnerOutput:
        return self.output()


class ScriptedExecutor:
    """Every request that samples gets token 7. calls: the control calls, in order."""

    def __init__(self) -> None:
        self.num_blocks = 64
        self.steps: list[SchedulerOutput] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refused: set[str] = set()
        self.answers: list[Any] = [None, None]
        self.closed = 0
        self.late: list[LateInputs] = []

    def submit(self, step: SchedulerOutput) -> Pending:
        self.steps.append(step)
        return Pending(lambda: RunnerOutput([7] * sum(step.samples)))

    def sample(self, late: LateInputs) -> None:
        self.late.append(late)

    def call(self, call: ControlCall) -> list[Any]:
        if call.arguments.get("digest") in self.refused:
            raise ControlError("it does not fit")
        self.calls.append((call.name, call.arguments))
        return self.answers

    def metrics(self) -> dict[str, Any]:
        return {"of_runner": 5}

    def close(self) -> None:
        self.closed += 1


def made(
    config: EngineConfig = BASE, start_s: float = 0.0, further: Sequence[PlanFeature] = ()
) -> tuple[EngineCore, ScriptedExecutor]:
    executor = ScriptedExecutor()
    features = [*plan_features(config, executor), *further]
    return EngineCore(config, executor, StepClock(config.device), start_s, features=features), executor


def request(name: str, *, adapter: str | None = None, grammar: str | None = None, **params: Any) -> EngineRequest:
    ref = None if adapter is None else AdapterRef(adapter, f"/{adapter}")
    return EngineRequest(name, (1, 2, 3), SamplingParams(**params), extras=extras_of(ref) | grammar_extras(grammar))


def seeds(core: EngineCore, executor: ScriptedExecutor, *asked: EngineRequest) -> list[int | None]:
    for each in asked:
        core.add(each)
    core.step()
    return [new.sampling_params.seed for new in executor.steps[-1].new]


def test_a_request_without_a_seed_gets_one() -> None:
    """Engines with the same seed give the same seeds."""
    asked = [request("a"), request("b", seed=5), request("c"), request("d", seed=0)]
    first = seeds(*made(), *asked)
    assert first[1::2] == [5, 0]
    assert None not in first
    assert first[0] != first[2]
    assert seeds(*made(), *asked) == first
    assert seeds(*made(replace(BASE, model=replace(BASE.model, seed=1))), *asked)[0] != first[0]
    assert asked[0].sampling_params.seed is None


def test_what_is_refused() -> None:
    core, executor = made()
    core.add(request("a"))
    mask = ByLastToken(101)
    for asked, given, message in (
        (request("a"), None, "request_id 'a' is already in use"),
        (request("b", token_mask=mask), None, "sampling_params.token_mask must be None in an EngineRequest"),
        (request("b", grammar="g"), mask, "request 'b' must have a grammar or a token mask, got both"),
        (request("b", grammar="g"), None, "the grammar of request 'b' needs a vocabulary"),
        (request("a", grammar="g"), None, "request_id 'a' is already in use"),
        (request("b", adapter="x"), None, "request 'b': enable_lora is False"),
        (EngineRequest("b", (1,) * 128, SamplingParams()), None, "must have at most 127 tokens"),
        (
            EngineRequest("b", (1,) * 128, SamplingParams(), extras=grammar_extras("g")),
            None,
            "must have at most 127 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            core.add(asked, given)
    assert core.metrics()["waiting"] == 1
    core.check_integrity()
    core.step()
    assert executor.steps[0].request_ids == ["a"]


def test_figures_of_all_parts() -> None:
    core, executor = made(start_s=2.5)
    core.add(request("a", max_tokens=2, ignore_eos=True))
    core.add(request("b", max_tokens=3, logprobs=None))
    assert core.can_step()
    while core.has_unfinished():
        core.step()
    metrics = core.metrics()
    assert (metrics["start_s"], metrics["of_runner"], metrics["grammar_requests"]) == (2.5, 5, 0)
    assert (metrics["generated_tokens"], metrics["finished"], metrics["waiting"]) == (5, 2, 0)
    assert metrics["steps"] == len(executor.steps) == 3
    assert not core.can_step()
    core.close()
    core.close()
    assert executor.closed == 1


@pytest.mark.parametrize(("causal", "slots"), [(True, 64 * 16), (False, NO_CACHE)])
def test_the_slots_of_the_cache(causal: bool, slots: int) -> None:
    core, _ = made(replace(BASE, model=replace(BASE.model, causal=causal)))
    assert core.num_slots == slots


def test_an_abort_is_known_once() -> None:
    core, _ = made()
    for name in "ab":
        core.add(request(name))
    for name, stopped in (("a", False), ("b", True)):
        output = core.abort(name, stopped=stopped)
        assert output is not None
        assert (output.request_id, output.finish_reason, output.num_cached_tokens) == (name, "abort", 0)
        assert core.abort(name) is None
    metrics = core.metrics()
    assert (metrics["aborted"], metrics["finished"]) == (1, 1)


def called(core: EngineCore, name: str, **arguments: Any) -> Any:
    return core.call(ControlCall(name, arguments))


class TestAdapters:
    def test_it_is_loaded_once_and_another_one_takes_its_place(self) -> None:
        core, executor = made(WITH_ADAPTERS)
        core.add(request("a", adapter="x", max_tokens=1))
        core.add(request("b", adapter="x", max_tokens=1))
        core.add(request("c", max_tokens=1))
        assert executor.calls == [("adapters.load", {"path": "/x", "digest": "x"})]
        while core.has_unfinished():
            core.step()
        core.add(request("d", adapter="y"))
        assert executor.calls[1:] == [
            ("adapters.load", {"path": "/y", "digest": "y"}),
            ("adapters.drop", {"digest": "x"}),
        ]

    def test_one_that_does_not_fit_refuses_its_request(self) -> None:
        core, executor = made(WITH_ADAPTERS)
        executor.refused = {"x"}
        with pytest.raises(ValueError, match="request 'a': it does not fit"):
            core.add(request("a", adapter="x"))
        assert not core.has_unfinished()
        assert core.metrics()["adapters_loaded"] == 0

    def test_one_that_is_in_use_is_not_dropped(self) -> None:
        core, executor = made(WITH_ADAPTERS)
        core.add(request("a", adapter="x"))
        called(core, "unload_adapter", digest="x")
        core.abort("a")
        called(core, "unload_adapter", digest="y")
        assert len(executor.calls) == 1
        called(core, "unload_adapter", digest="x")
        assert executor.calls[1:] == [("adapters.drop", {"digest": "x"})]

    def test_it_is_read_beside_steps_unless_it_is_there(self) -> None:
        core, executor = made(WITH_ADAPTERS)
        executor.answers = [True, False]
        called(core, "begin_load_adapter", path="/x", digest="x")
        assert not called(core, "has_read_adapter", digest="x")
        executor.answers = [True, True]
        assert called(core, "has_read_adapter", digest="x")
        assert executor.calls == [
            ("adapters.begin_load", {"path": "/x", "digest": "x"}),
            *[("adapters.has_read", {"digest": "x"})] * 2,
        ]
        called(core, "load_adapter", path="/x", digest="x")
        executor.answers = [False]
        called(core, "begin_load_adapter", path="/x", digest="x")
        assert called(core, "has_read_adapter", digest="x")
        assert executor.calls[3:] == [("adapters.load", {"path": "/x", "digest": "x"})]

    def test_without_slots_nothing_is_read(self) -> None:
        core, executor = made()
        called(core, "begin_load_adapter", path="/x", digest="x")
        assert called(core, "has_read_adapter", digest="x")
        with pytest.raises(ControlError, match="enable_lora is False, so there are no adapters; allowed: True"):
            called(core, "load_adapter", path="/x", digest="x")
        assert executor.calls == []


def test_calls_between_steps() -> None:
    core, executor = made(WITH_ADAPTERS)
    assert core.call(ControlCall("metrics")) == core.metrics()
    assert core.call(ControlCall("check_integrity")) is None
    assert core.call(ControlCall("reset_prefix_cache")) is None
    core.call(ControlCall("load_adapter", {"path": "/x", "digest": "x"}))
    core.call(ControlCall("begin_load_adapter", {"path": "/y", "digest": "y"}))
    assert core.call(ControlCall("has_read_adapter", {"digest": "x"}))
    core.call(ControlCall("unload_adapter", {"digest": "x"}))
    assert [name for name, _ in executor.calls] == ["adapters.load", "adapters.begin_load", "adapters.drop"]
    for name in ("step", "close", "abort"):
        with pytest.raises(ControlError, match=f"call is '{name}'; allowed: metrics, reset_prefix_cache"):
            core.call(ControlCall(name))


def test_an_order_whose_failure_nothing_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    core, executor = made(WITH_ADAPTERS)
    core.tell(ControlCall("load_adapter", {"path": "/x", "digest": "x"}))
    assert [name for name, _ in executor.calls] == ["adapters.load"]
    core.tell(ControlCall("step"))
    (record,) = caplog.records
    assert record.getMessage().startswith("a control call has failed: call is 'step'; allowed: metrics, ")


def test_the_prefix_cache_is_forgotten() -> None:
    core, _ = made()
    for expected in (0, 16, 0):
        core.add(EngineRequest("a", tuple(range(20)), SamplingParams(max_tokens=1)))
        (output,) = core.step()
        assert output.num_cached_tokens == expected
        if expected:
            core.reset_prefix_cache()


def test_the_scheduler_has_what_is_configured() -> None:
    draft = replace(BASE, speculation=SpeculationConfig("ngram", 2, sharpnesses=(2.5,)))
    core, executor = made(draft)
    core.add(request("a"))
    core.step()
    core.step()
    assert [(sharpness_of(step), step.counts) for step in executor.steps] == [(2.5, [3]), (2.5, [3])]
    states = Recurrences((RowState("a", (1,), "float32"),), num_rows=8, num_snapshots=2)
    recurrent = replace(BASE, model=replace(BASE.model, recurrences=states))
    no_snapshots = replace(BASE, model=replace(BASE.model, recurrences=replace(states, num_snapshots=0)))
    uncached = replace(recurrent, cache=replace(BASE.cache, enable_prefix_caching=False))
    for config, extras in ((recurrent, {"recurrence": {"a": 0}}), (no_snapshots, {}), (uncached, {}), (BASE, {})):
        core, executor = made(config)
        core.add(EngineRequest("a", (1,) * 80, SamplingParams()))
        core.step()
        assert executor.steps[0].extras == extras


class LateNames(PlanFeature):
    """Has each step sampled late, and sends the names of its requests."""

    def added(self, request: Request) -> None:
        request.samples_late = True

    def begin_late(self, requests: Sequence[Request]) -> None:
        self._names = [request.request_id for request in requests]

    def finish_late(self) -> dict[str, Any]:
        return {"names": self._names}


def test_a_step_that_samples_late_is_sampled_when_its_inputs_are_there() -> None:
    core, executor = made()
    core.add(request("plain", max_tokens=3, ignore_eos=True))
    core.add(request("masked", max_tokens=2, ignore_eos=True), ByLastToken(101))
    while core.has_unfinished():
        core.step()
    assert [late.extras["structured"].request_ids for late in executor.late] == [["masked"], ["masked"]]
    assert [step.samples_late for step in executor.steps] == [True, True, False]


def test_several_features_may_have_late_inputs() -> None:
    core, executor = made(further=(LateNames(),))
    core.add(request("plain", max_tokens=1))
    core.add(request("masked", max_tokens=1), ByLastToken(101))
    core.step()
    (late,) = executor.late
    assert (late.extras["names"], late.extras["structured"].request_ids) == (["plain", "masked"], ["masked"])


class Grammars:
    """A queue whose grammars are ready when they are said to be."""

    def __init__(self) -> None:
        self.waiting: dict[str, EngineRequest] = {}
        self.patience: list[float] = []
        self.ready: list[str] = []
        self.failed: list[EngineOutput] = []

    def add(self, asked: EngineRequest) -> None:
        self.waiting[asked.request_id] = asked

    def remove(self, name: str) -> bool:
        return self.waiting.pop(name, None) is not None

    def release(self, patience_s: float = 0.0) -> Any:
        self.patience.append(patience_s)
        ready = [(self.waiting.pop(name), MaskConstraint(ByLastToken(101), 101)) for name in self.ready]
        failed, self.ready, self.failed = self.failed, [], []
        for output in failed:
            del self.waiting[output.request_id]
        return ready, failed

    def metrics(self) -> dict[str, Any]:
        return {"grammar_requests": 7}


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    made = Grammars()
    monkeypatch.setattr("compiled_engine.features.structured.plan.GrammarQueue", lambda: made)
    return made


def test_requests_wait_for_their_grammars_beside_the_others(grammars: Grammars) -> None:
    """A step waits a moment for one only where there is nothing else to do."""
    core, executor = made()
    for name in "abc":
        core.add(request(name, grammar="g", max_tokens=2, ignore_eos=True))
    with pytest.raises(ValueError, match="request_id 'a' is already in use"):
        core.add(request("a"))
    assert core.has_unfinished()
    assert core.metrics()["waiting"] == core.metrics()["waiting_by_reason"]["feature"] == 3
    assert core.metrics()["grammar_requests"] == 7
    assert len(core.step()) == 0
    core.add(request("plain", max_tokens=9, ignore_eos=True))
    core.step()
    grammars.ready = ["b"]
    grammars.failed = [EngineOutput("c", (), finish_reason="error", stop_reason="odd")]
    outputs = list(core.step())
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("plain", None), ("b", None), ("c", "error")
    ]  # fmt: skip
    assert [late.extras["structured"].request_ids for late in executor.late] == [["b"]]
    aborted = core.abort("a")
    assert aborted is not None
    assert (aborted.finish_reason, aborted.num_cached_tokens) == ("abort", 0)
    assert core.metrics()["waiting"] == 0
    assert core.metrics()["aborted"] == 2
    core.step()
    assert grammars.patience == [0.005, 0, 0]


def test_a_step_that_fails_loses_no_end_of_a_request_that_was_held_back(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, executor = made()
    core.add(request("a", grammar="g"))
    core.add(request("plain"))
    core.step()
    grammars.failed = [EngineOutput("a", (), finish_reason="error", stop_reason="odd")]

    def fail() -> RunnerOutput:
        raise RuntimeError("the step failed")

    monkeypatch.setattr(executor, "submit", lambda step: Pending(fail))
    with pytest.raises(RuntimeError, match="the step failed"):
        core.step()
    assert core.has_unfinished()
    assert [(output.request_id, output.stop_reason) for output in core.step()] == [("a", "odd")]
    assert not core.has_unfinished()


def test_an_adapter_may_be_gone_when_a_grammar_is_ready(grammars: Grammars) -> None:
    core, executor = made(WITH_ADAPTERS)
    core.add(request("a", adapter="x", grammar="g"))
    called(
        core, "load_adapter", path="/y", digest="y"
    )  # it takes the place of x, which no request of the scheduler uses
    grammars.ready, executor.refused = ["a"], {"x"}
    (output,) = core.step()
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert output.stop_reason == "request 'a': it does not fit"
    assert not core.has_unfinished()
    core.add(request("a"))  # the grammar went with its request
    core.step()
    assert executor.steps[-1].new[0].extras == {}
