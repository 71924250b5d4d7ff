"""The executor of several ranks and the loop of each rank: steps, late inputs, calls and failures, without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_rank import NAME, FaultyRank
from rank_threads import ScriptedRunner, rank_threads
from tiny_models import tiny_config

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall, LateInputs, SchedulerOutput
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes import monitor, multiprocess_executor, ring
from compiled_engine.processes.monitor import Monitor, WorkerError
from compiled_engine.processes.multiprocess_executor import BUSY_S, StepError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return tiny_config()


def of(
    config: EngineConfig,
    tensor: int = 2,
    stage_layers: tuple[int, ...] = (),
    scheduler: dict[str, Any] | None = None,
    **changes: Any,
) -> EngineConfig:
    parallel = replace(config.parallel, tensor_parallel_size=tensor, stage_layers=stage_layers, executor="multiprocess")
    return replace(config, parallel=parallel, scheduler=replace(config.scheduler, **scheduler or {}), **changes)


def step(number: int, *, samples_late: bool = False) -> SchedulerOutput:
    return SchedulerOutput(number, (), (), ["a"], [0], [1], [True], {}, samples_late=samples_late)


def late(*values: str) -> LateInputs:
    return LateInputs({"f": list(values)})


Prepare = Callable[[list[ScriptedRunner]], None]


@pytest.fixture
def ranks(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Factory of executors, see rank_threads."""
    monkeypatch.setattr(monitor, "_APART_S", 0.3)

    def make(prepare: Prepare = lambda runners: None, capacity: int = 1 << 16, **layout: Any) -> Any:
        return rank_threads(of(config, **layout), monkeypatch, tmp_path, prepare, capacity=capacity)

    return make


@pytest.mark.parametrize("layout", [{"tensor": 1}, {"tensor": 2}, {"tensor": 1, "stage_layers": (1, 1)}])
def test_steps_sent_together_are_executed_by_all_ranks_in_order(ranks: Any, layout: dict[str, Any]) -> None:
    with ranks(**layout) as (executor, launch):
        pending = [executor.submit(step(number)) for number in (1, 2, 3)]
        assert [list(each.result().token_ids) for each in pending] == [[1, 0], [2, 0], [3, 0]]
        last = executor.submit(step(4))
        assert list(last.result().token_ids) == [4, 0]
        executor.call(ControlCall("metrics"))  # every rank is behind its steps
        assert [runner.told for runner in launch.runners] == [[1, 2, 3, 4]] * len(launch.runners)


def test_a_step_that_samples_late_is_sampled_with_its_late_inputs(ranks: Any) -> None:
    """Its result has their effect, whether or not the steps before and after it sample late."""
    with ranks() as (executor, launch):
        first = executor.submit(step(1))
        second = executor.submit(step(2, samples_late=True))
        executor.sample(late("a", "b", "c"))
        third = executor.submit(step(3))
        assert [list(each.result().token_ids) for each in (first, second, third)] == [[1, 0], [2, 3], [3, 0]]
        executor.call(ControlCall("metrics"))
        assert [runner.told for runner in launch.runners] == [[1, 2, ["a", "b", "c"], 3]] * 2


def test_a_step_whose_late_inputs_never_come_has_a_result_all_the_same(ranks: Any) -> None:
    """Once, before that of the next step; late inputs that come afterwards belong to no step."""
    with ranks() as (executor, _):
        first = executor.submit(step(1, samples_late=True))
        second = executor.submit(step(2))
        executor.sample(late("a"))
        third = executor.submit(step(3))
        assert [each.result().token_ids[0] for each in (first, second, third)] == [1, 2, 3]


def test_a_stage_that_samples_nothing_waits_for_no_late_inputs(ranks: Any) -> None:
    """The first stage of two goes on with the next step; only the last one gets the late inputs."""
    with ranks(tensor=1, stage_layers=(1, 1)) as (executor, launch):
        first = executor.submit(step(1, samples_late=True))
        executor.sample(late("a"))
        assert list(first.result().token_ids) == [1, 1]
        executor.call(ControlCall("metrics"))
        assert [runner.told for runner in launch.runners] == [[1], [1, ["a"]]]


@pytest.mark.parametrize("samples_late", [False, True])
def test_a_step_that_all_ranks_fail_at_one_place_fails_alone(ranks: Any, samples_late: bool) -> None:
    """Steps that were sent after it are not executed, and fail as it does."""

    def fail(runners: list[ScriptedRunner]) -> None:
        for runner in runners:
            runner.fails[2] = KeyError("no room")
            runner.runs_begun = runner.runs_ended = 3

    with ranks(fail) as (executor, launch):
        pending = [executor.submit(step(number, samples_late=samples_late and number == 2)) for number in (1, 2)]
        if samples_late:
            executor.sample(late("a"))  # for a step that has failed
        pending.append(executor.submit(step(3)))
        assert list(pending[0].result().token_ids) == [1, 0]
        for each in pending[1:]:
            told = r"^rank 0 of 2: KeyError: 'no room'\nin the worker of rank 0 of 2:\nTraceback"
            with pytest.raises(StepError, match=told):
                each.result()
        assert list(executor.submit(step(4)).result().token_ids) == [4, 0]
        executor.call(ControlCall("metrics"))
        assert [runner.told for runner in launch.runners] == [[1, 2, 4]] * 2


def test_a_step_that_fails_awaits_no_late_inputs(ranks: Any) -> None:
    def fail(runners: list[ScriptedRunner]) -> None:
        for runner in runners:
            runner.fails[1] = KeyError("injected")

    with ranks(fail) as (executor, _), pytest.raises(StepError, match="injected"):
        executor.submit(step(1, samples_late=True)).result()


def apart(runners: list[ScriptedRunner]) -> None:
    """All ranks fail in the same step, but one of them has run the model more often."""
    for runner in runners:
        runner.fails[1] = KeyError("injected")
    runners[1].runs_begun = runners[1].runs_ended = 1


def apart_in_sampling(runners: list[ScriptedRunner]) -> None:
    apart(runners)
    runners[1].runs_begun = runners[1].runs_ended = 0
    runners[1].num_exchanges = 1


def apart_in_both(runners: list[ScriptedRunner]) -> None:
    apart(runners)
    runners[0].runs_begun = runners[0].runs_ended = 2
    runners[0].num_exchanges = 1


def inside(runners: list[ScriptedRunner]) -> None:
    """One rank fails inside a run of the model, where another may wait for it."""
    for runner in runners:
        runner.fails[1] = KeyError("injected")
    runners[0].runs_begun = runners[1].runs_begun = runners[0].runs_ended = 2
    runners[1].runs_ended = 1


def first_alone(runners: list[ScriptedRunner]) -> None:
    runners[0].fails[1] = KeyError("injected")


def second_alone(runners: list[ScriptedRunner]) -> None:
    runners[1].fails[1] = KeyError("injected")


@pytest.mark.parametrize("prepare", [apart, apart_in_sampling, apart_in_both, inside, first_alone])
def test_ranks_that_do_not_fail_alike_end_the_executor(ranks: Any, prepare: Prepare) -> None:
    with ranks(prepare) as (executor, _):
        pending = executor.submit(step(1))
        with pytest.raises(WorkerError, match="rank 0 of 2: KeyError: 'injected'"):
            pending.result()
        for call in (lambda: executor.submit(step(2)), lambda: executor.sample(late("a")), executor.metrics):
            with pytest.raises(WorkerError, match="rank 0 of 2: KeyError: 'injected'"):
                call()


def test_a_rank_without_results_that_fails_alone_is_named(ranks: Any) -> None:
    """Although the step's result comes: the next one would wait for that rank."""
    with ranks(second_alone) as (executor, _):
        executor.submit(step(1)).result()
        with pytest.raises(WorkerError, match="rank 1 of 2: KeyError: 'injected'"):
            while_possible(executor, [], submits=True)


def test_a_step_that_fails_in_a_pipeline_ends_the_executor(ranks: Any) -> None:
    """Messages between its stages would be left over."""

    def fail(runners: list[ScriptedRunner]) -> None:
        for runner in runners:
            runner.fails[1] = KeyError("injected")

    with ranks(fail, tensor=1, stage_layers=(1, 1)) as (executor, _):
        name = r"rank 1 of 2 \(stage 1 of 2\)"
        with pytest.raises(WorkerError, match=f"^{name}: KeyError"):
            executor.submit(step(1)).result()


def test_a_single_rank_goes_on_after_a_step_that_fails_late(ranks: Any) -> None:
    """Its result raises, and no other rank has to fail with it."""

    def fail(runners: list[ScriptedRunner]) -> None:
        runners[0].fails_later[1] = ValueError("later")

    with ranks(fail, tensor=1) as (executor, _):
        first, second = executor.submit(step(1)), executor.submit(step(2))
        with pytest.raises(StepError, match="rank 0 of 1: ValueError: later"):
            first.result()
        assert list(second.result().token_ids) == [2, 0]


def test_more_steps_than_there_is_room_for_are_executed(ranks: Any) -> None:
    """Before a result is read: their rank waits for room, too."""
    with ranks(capacity=64) as (executor, _):
        pending = [executor.submit(step(number)) for number in range(30)]
        assert [each.result().token_ids[0] for each in pending] == list(range(30))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("full", [False, True])
def test_the_end_of_a_rank_ends_every_wait(ranks: Any, rank: int, full: bool) -> None:
    """Waits for results and for room end."""

    def prepare(runners: list[ScriptedRunner]) -> None:
        runners[0].waits_for[1] = threading.Event()  # which nobody sets

    with ranks(prepare, capacity=64 if full else 1 << 16) as (executor, launch):
        threading.Timer(0.1, launch.children[rank].hang_up).start()
        pending = [executor.submit(step(1))]
        with pytest.raises(WorkerError, match=f"the worker of rank {rank} of 2 has ended"):
            while_possible(executor, pending, submits=full)


def while_possible(executor: Any, pending: list[Any], *, submits: bool) -> None:
    """Submit steps, or read results, until that fails."""
    for number in range(2, 1_000_000):
        if submits:
            executor.submit(step(number))
        else:
            pending.append(executor.submit(step(number)))
            pending.pop(0).result()


def test_a_call_reaches_every_rank_behind_the_steps_before_it(ranks: Any) -> None:
    with ranks() as (executor, launch):
        pending = executor.submit(step(1))
        assert [found["steps"] for found in executor.call(ControlCall("metrics"))] == [[1], [1]]
        pending.result()
        for name in ("adapters.begin_load", "adapters.load"):
            assert executor.call(ControlCall(name, {"path": "p", "digest": "d"})) == [None, None]
        assert executor.call(ControlCall("adapters.has_read", {"digest": "1"})) == [False, True]
        executor.call(ControlCall("adapters.drop", {"digest": "d"}))
        assert [runner.told for runner in launch.runners] == [
            [1, ("begin", "p", "d"), ("load", "p", "d"), ("drop", "d")]
        ] * 2
        said = "adapters.drop: KeyError: 'missing'"
        with pytest.raises(ControlError, match=f"^rank 0 of 2: {said}; rank 1 of 2: {said}$"):
            executor.call(ControlCall("adapters.drop", {"digest": "missing"}))


def test_the_metrics_are_those_of_the_rank_that_samples(ranks: Any) -> None:
    with ranks(tensor=1, stage_layers=(1, 1)) as (executor, _):
        assert executor.metrics() == {"rank": 1, "steps": [], "cache_key": "key", "collectives": "threads"}
    with ranks(tensor=2) as (executor, _):
        assert executor.metrics()["rank"] == 0


@pytest.mark.parametrize(("name", "other"), [("num_blocks", 8), ("cache_key", "another")])
def test_ranks_that_start_differently_do_not_start(ranks: Any, name: str, other: Any) -> None:
    """Blocks of one would be missing in the other; another model would answer with other numbers of tokens."""

    def prepare(runners: list[ScriptedRunner]) -> None:
        setattr(runners[1], name, other)

    with (
        pytest.raises(WorkerError, match=rf"^rank 1 of 2 has started with .*{name}='?{other}'?.*, rank 0 with"),
        ranks(prepare),
    ):
        pass


@pytest.mark.parametrize(("num_threads", "share"), [(7, 3), (1, 1)])
def test_ranks_start_with_what_the_engine_was_given(
    num_threads: int, share: int, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch's threads are divided among them. The first one alone shows progress."""
    timeline = Timeline()
    timeline.add("read the options", 0.0, 0.25)
    given = of(config)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with rank_threads(given, monkeypatch, tmp_path, processors=[NAME], timeline=timeline, progress=True) as found:
        executor, launch = found
        assert executor.num_blocks == 7
        executor.metrics()  # all ranks have begun
        assert launch.starts.keys() == {0, 1}
        for start in launch.starts.values():
            assert start.config == given
            assert start.logits_processors == (NAME,)
            assert (start.num_threads, start.busy_s, start.progress) == (share, 0.0, True)
            assert start.origin_s == timeline.origin_s
            assert [span.name for span in start.spans] == ["read the options"]
        assert threads == [share, share]
        assert sorted(launch.joined) == [("cpu", 0, 2), ("cpu", 1, 2)]
        assert sorted(launch.beats) == [(0, 2), (1, 2)]
        shown = [type(runner.arguments[1]).__name__ for runner in launch.runners]
        assert shown == ["RichProgress", "SilentProgress"]
        for runner in launch.runners:
            assert runner.arguments[0] == given
            names = [span.name for span in runner.arguments[2].spans]
            assert names == ["read the options", "start the workers", "connect the ranks"]
            waited = runner.arguments[2].spans[1]
            assert waited.start_s == 0.25  # where the timeline ended so far
            assert runner.arguments[5] == (FaultyRank,)
            assert runner.arguments[6].rank == runner.rank


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("step_tokens", "is_async", "limit_s", "busy_s"),
    [(256, False, 8.0, BUSY_S), (256, True, 8.0, 0.0), (8192, False, 8.0, BUSY_S), (16384, False, 16.0, BUSY_S)],
)
def test_on_gpus_results_have_a_time_limit(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, step_tokens: int, is_async: bool, limit_s: float, busy_s: float
) -> None:
    """The limit grows with the largest step, and holds while a result is awaited. Both sides stay awake where a step is
    awaited before the next is sent."""
    limits: list[float | None] = []
    waits: list[float] = []

    def await_bell(bells: Any, seconds: float) -> None:
        waits.append(seconds)
        ring.await_bell(bells, 0.0)

    monkeypatch.setattr(Monitor, "expect_result_within", lambda self, seconds: limits.append(seconds))
    monkeypatch.setattr(multiprocess_executor, "await_bell", await_bell)

    def slow(runners: list[ScriptedRunner]) -> None:
        runners[0].delay_s = 0.05

    changes = {"max_num_batched_tokens": step_tokens, "async_scheduling": is_async}
    with ranks(slow, device=GPU, scheduler=changes) as (executor, launch):
        executor.submit(step(1)).result()
        assert [start.busy_s for start in launch.starts.values()] == [busy_s] * 2
        assert limits == [limit_s, None]
        assert set(waits) == {busy_s}


def test_on_a_cpu_results_have_no_time_limit(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(Monitor, "expect_result_within", lambda self, seconds: limits.append(seconds))
    with ranks(scheduler={"max_num_batched_tokens": 1 << 20}) as (executor, launch):
        executor.submit(step(1)).result()
        assert limits == [None, None]
        assert not any(start.progress for start in launch.starts.values())  # unless it is asked for


@pytest.mark.parametrize("is_async", [False, True])
def test_on_a_gpu_a_step_is_launched_while_another_runs(ranks: Any, is_async: bool) -> None:
    """With asynchronous scheduling. Results come in the order of the steps."""
    launched = threading.Event()

    def prepare(runners: list[ScriptedRunner]) -> None:
        runners[0].waits_for[1] = launched
        runners[0].launches[2] = launched

    with ranks(prepare, tensor=1, device=GPU, scheduler={"async_scheduling": is_async}) as (executor, _):
        pending = [executor.submit(step(number)) for number in (1, 2, 3)]
        assert launched.wait(60 if is_async else 0.1) == is_async
        launched.set()
        assert [list(each.result().token_ids) for each in pending] == [[1, 0], [2, 0], [3, 0]]


def test_workers_that_cannot_be_watched_are_ended(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Monitor:
        raise OSError("too many open files")

    monkeypatch.setattr(multiprocess_executor, "Monitor", fail)
    with pytest.raises(OSError, match="too many open files"), ranks():
        pass


def test_the_end_is_told_to_every_rank(ranks: Any) -> None:
    """They free what they have, in order, and are waited for."""

    def slow(runners: list[ScriptedRunner]) -> None:
        runners[1].delay_s = 0.1

    with ranks(slow) as (executor, launch):
        executor.submit(step(1)).result()
        executor.close()
        assert [runner.closed for runner in launch.runners] == [["runner", "group"]] * 2
        assert not any(child.thread.is_alive() for child in launch.children)
        with pytest.raises(WorkerError, match="have been told to stop"):
            executor.submit(step(2))


def test_a_rank_that_cannot_start_says_why(ranks: Any, monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    """The exception is its own, as it may be about an option."""

    def prepare(runners: list[ScriptedRunner]) -> None:
        def metrics() -> dict[str, Any]:
            raise ValueError("no such option")

        runners[1].metrics = metrics  # type: ignore[method-assign]

    with pytest.raises(ValueError, match=r"^rank 1 of 2: no such option\n"), ranks(prepare):
        pass
