"""The runner: rows of requests, steps and what they yield, steps that fail, control calls, and the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from recorded_capture import RecordedCapture
from runner_of import runner_of

from compiled_engine.config import GraphConfig, GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine import scheduler
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.executor import ControlCall
from compiled_engine.engine.messages import EngineRequest, LateInputs, NewRequest, SchedulerOutput
from compiled_engine.engine.runner import Runner
from compiled_engine.graphs.cuda_graphs.manager import GraphCounters
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": 6, "max_num_batched_tokens": 32}
PROMPT = (5, 100, 7, 2000, 9, 11)


def made(graph: GraphConfig | None = None) -> EngineCore:
    config = resolve(EngineOptions(**OPTIONS, max_model_len=64, num_blocks=40))
    return start_core(config if graph is None else replace(config, graph=graph), SilentProgress())


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    """Its scheduler knows none of the requests that tests give the runner."""
    core = made()
    yield core
    core.close()


@pytest.fixture
def runner(core: EngineCore) -> Runner:
    return runner_of(core)


def request(name: str, *blocks: int, prompt: tuple[int, ...] = PROMPT, **params: Any) -> NewRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 1} | params)
    return NewRequest(name, prompt, len(prompt), sampling, frozenset(), (blocks,))


def step_of(
    *shares: tuple[str, int, int],
    new: tuple[NewRequest, ...] = (),
    removed: tuple[str, ...] = (),
    samples: list[bool] | None = None,
) -> SchedulerOutput:
    """New requests take the place of those that had their names."""
    names, starts, counts = (list(each) for each in zip(*shares, strict=True))
    removed += tuple(each.request_id for each in new)
    return SchedulerOutput(1, removed, new, names, starts, counts, samples or [True] * len(names), {})


def generated(runner: Runner, name: str, count: int, start: int = len(PROMPT)) -> list[int]:
    """The next tokens of a request, one a step."""
    return [runner.submit(step_of((name, start + number, 1))).result().token_ids[0] for number in range(count)]


@pytest.fixture
def expected(runner: Runner) -> list[int]:
    """The first five tokens of the prompt, generated alone."""
    first = runner.submit(step_of(("a", 0, 6), new=(request("a", 0, 1),))).result().token_ids
    return first + generated(runner, "a", 4)


def test_a_prompt_may_come_in_chunks_beside_other_requests(runner: Runner, expected: list[int]) -> None:
    """The borders of chunks and the blocks of keys change no token; results are in the step's order."""
    new = (request("a", 7), request("b", 3, prompt=(8, 9)))
    first = runner.submit(step_of(("b", 0, 2), ("a", 0, 4), new=new, samples=[True, False])).result()
    assert len(first.token_ids) == 1
    second = runner.submit(step_of(("b", 2, 1), ("a", 4, 2))).result()
    assert second.token_ids[1] == expected[0]
    assert generated(runner, "a", 4) == expected[1:]


def test_steps_may_be_submitted_before_the_results_of_others_are_read(runner: Runner, expected: list[int]) -> None:
    """The tokens of a step are read by the next one on the device."""
    first = runner.submit(step_of(("a", 0, 6), new=(request("a", 5),)))
    second = runner.submit(step_of(("a", 6, 1)))
    assert [first.result().token_ids, second.result().token_ids] == [expected[:1], expected[1:2]]


def test_rows_of_removed_requests_are_given_to_others(runner: Runner, expected: list[int]) -> None:
    """Nothing is left of their parameters, however often rows change hands."""
    for number in range(9):
        other = request("b", 2, repetition_penalty=9.0, prompt=(7 + number,) * 6)
        runner.submit(step_of(("b", 0, 6), new=(other,)))
        found = runner.submit(step_of(("a", 0, 6), new=(request("a", 4),), removed=("b",))).result()
        assert found.token_ids == expected[:1]
    with pytest.raises(KeyError):
        runner.states.row("b")


def test_a_request_that_cannot_be_added_leaves_no_row(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(runner.sampler, "add_row", fail)
        with pytest.raises(MemoryError, match="injected"):
            runner.submit(step_of(("c", 0, 6), new=(request("c", 0),)))
    with pytest.raises(KeyError):
        runner.states.row("c")


def test_a_step_that_samples_late_has_its_tokens_after_its_late_inputs(runner: Runner, expected: list[int]) -> None:
    step = step_of(("a", 0, 6), new=(request("a", 0),))
    pending = runner.submit(replace(step, samples_late=True))
    runner.sample(LateInputs())
    assert pending.result().token_ids == expected[:1]
    assert generated(runner, "a", 2) == expected[1:3]


def test_runs_are_counted_and_metrics_name_what_there_is(core: EngineCore, runner: Runner) -> None:
    before = runner.runs_begun, runner.runs_ended
    runner.submit(step_of(("a", 0, 6), new=(request("a", 0),)))
    assert (runner.runs_begun, runner.runs_ended) == (before[0] + 1, before[1] + 1)
    assert next(iter(runner.calls)) == "metrics"
    found = core.executor.call(ControlCall("metrics"))[0]
    assert (found["cache"], found["captures"], found["traces"]) == ("off", 0, 0)
    assert found["start_up_seconds"].keys() >= {"load weights", "warm up"}


def test_closing_gives_the_caches_and_the_weights_back() -> None:
    core = made()
    runner = runner_of(core)
    caches, model = runner.model.kv_caches, weakref.ref(runner.model.ends["logits"].__self__)
    assert {cache.shape[0] for cache in caches} == {runner.num_blocks}
    core.close()
    assert caches == []
    assert model() is None


# --- steps that fail, in an engine ---


def asked(count: int, shortest: int) -> list[EngineRequest]:
    return [
        EngineRequest(
            str(i),
            tuple((31 * i + 7 * place) % 4096 for place in range((1, 9, 21)[i % 3])),
            SamplingParams(temperature=(0.0, 0.9)[i % 2], seed=i, max_tokens=shortest + 2 * i, ignore_eos=True),
        )
        for i in range(count)
    ]


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[int]]:
    for each in requests:
        core.add(each)
    found: dict[str, list[int]] = {each.request_id: [] for each in requests}
    while core.has_unfinished():
        for output in core.step():
            found[output.request_id] += output.new_token_ids
    core.check_integrity()
    return found


def test_an_interrupt_at_the_launch_shifts_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has counted a step then, and the host has not."""
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)
    core = made(GraphConfig(GraphMode.FULL_DECODE_ONLY, (1, 2, 4)))
    expected = run(core, asked(3, 4))
    replay = GraphCounters.replay

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(GraphCounters, "replay", replay)
        raise KeyboardInterrupt

    monkeypatch.setattr(GraphCounters, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(core, asked(3, 4))
    assert run(core, asked(3, 4)) == expected


def test_a_step_that_fails_anywhere_leaves_the_core_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    core = made()
    runner = runner_of(core)
    requests = asked(6, 1)  # which need every row
    expected = run(core, requests)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("injected")

    broken_ones: tuple[tuple[Any, str], ...] = (
        (runner.sampler, "add_row"),
        (runner.states, "remove"),
        (runner.model, "run"),
        (runner.sampler, "sample"),
        (scheduler, "tokens_output"),
    )
    for owner, name in broken_ones:
        for request in asked(2, 6):
            core.add(request)
        core.step()
        for request in asked(3, 1)[2:]:
            core.add(request)
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, fail)
            try:
                for _ in range(20):
                    core.step()
            except MemoryError:
                pass
        for request_id in ("0", "1", "2"):
            core.abort(request_id)
        assert run(core, requests) == expected, name
        assert core.metrics()["blocks_free"] == core.metrics()["blocks_total"]
