"""A made-up feature, with both halves, plugs into an engine from outside: a request limits the tokens of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.engine.forward import ForwardOutput
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import EngineRequest, NewRequest, SchedulerOutput
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.step_hooks import RunnerFeatures, RunnerParts, StepFeature
from compiled_engine.features.registry import make_features, plan_features, step_features
from compiled_engine.options import EngineOptions
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.resolve.engine import resolve
from compiled_engine.rows.row_fields import RowField
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.params import SamplingParams

NAME = "step_tokens"
PROMPTS = {"a": tuple(range(100, 120)), "b": tuple(range(300, 311)), "c": tuple(range(500, 504))}
NUM_TOKENS = {"a": 5, "b": 7, "c": 3}


class StepTokens(PlanFeature):
    """Limits the tokens that a step computes of a request to its extra_args["step_tokens"]."""

    def __init__(self) -> None:
        self._num_steps: dict[Request, int] = {}
        self._ended: dict[str, int] = {}

    def check(self, request: EngineRequest) -> None:
        most = (request.sampling_params.extra_args or {}).get(NAME, 1)
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"{NAME} must be a positive number, got {most!r}")

    def added(self, request: Request) -> None:
        most = (request.sampling_params.extra_args or {}).get(NAME)
        if most is not None:
            request.max_step_tokens = min(request.max_step_tokens, most)
            request.extras[NAME] = most
            self._num_steps[request] = 0

    def output_extras(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        """Count the steps of a request that had its limit on the device; the output gets nothing."""
        found = extras.get(NAME, {}).get(request.request_id)
        if found is not None and found == request.extras[NAME]:
            self._num_steps[request] += 1
        return {}

    def ended(self, request: Request) -> None:
        if request in self._num_steps:
            self._ended[request.request_id] = self._num_steps.pop(request)

    def metrics(self) -> dict[str, Any]:
        return {"limited_steps": dict(self._ended)}


@dataclass(frozen=True)
class ReadLimits:
    """The limits of a step's requests, as they were on the device."""

    request_ids: list[str]
    limits_R: torch.Tensor

    def by_request(self) -> dict[str, int]:
        limits = zip(self.request_ids, self.limits_R.tolist(), strict=True)
        return {request_id: limit for request_id, limit in limits if limit}


class StepTokenRows(StepFeature):
    """Keeps the limits in a row field, and counts the rows that have one in each step."""

    name = NAME

    def __init__(self, parts: RunnerParts) -> None:
        self._states, self._fields, self._device = parts.states, parts.states.fields, parts.config.device
        self._fields.declare(RowField(NAME))
        self._num_limited = torch.zeros((), dtype=torch.int64, device=self._device)
        self.rows: set[int] = set()
        self._limits_R = torch.empty(0)

    def added(self, row: int, request: NewRequest) -> None:
        if NAME in request.extras:
            self.rows.add(row)
            self._fields.set(row, **{NAME: request.extras[NAME]})

    def removed(self, row: int) -> None:
        self.rows.discard(row)

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether a request of the step has a limit: only such a step can have a result."""
        return any(self._states.row(request_id) in self.rows for request_id in step.request_ids)

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Read the field of the step's rows, whether or not the host knows of a limit."""
        rows_R = upload(batch.rows[: len(batch.request_of_row)], self._device)
        self._limits_R = self._fields[NAME][rows_R]
        self._num_limited += (self._limits_R > 0).sum()

    def read_hidden(self, batch: InputBatch, output: ForwardOutput) -> ReadLimits:
        return ReadLimits(list(batch.request_of_row), self._limits_R)

    def metrics(self) -> dict[str, Any]:
        return {"limited_rows": int(self._num_limited)}


def with_rows(parts: RunnerParts) -> RunnerFeatures:
    """Implements MakeFeatures.of_runner."""
    made = step_features(parts)
    return made._replace(features=[*made.features, StepTokenRows(parts)])


def start(*, has_feature: bool) -> EngineCore:
    """Return an engine that runs two requests at a time."""
    config = resolve(
        EngineOptions(
            device="cpu", mode="eager", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, num_blocks=64
        )
    )
    clock = StepClock(config.device)
    make = replace(make_features(), of_runner=with_rows) if has_feature else make_features()
    executor = InProcessExecutor(config, SilentProgress(), Timeline(), clock, make, ())
    features = plan_features(config, executor)
    return EngineCore(config, executor, clock, features=[*features, StepTokens()] if has_feature else features)


def request(name: str, extra_args: dict[str, Any] | None) -> EngineRequest:
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=NUM_TOKENS[name], ignore_eos=True, extra_args=extra_args
    )
    return EngineRequest(name, PROMPTS[name], params)


def run(core: EngineCore, limits: dict[str, int]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the tokens of the requests, and the metrics after them. "c" waits for the row of one that ends."""
    for name in PROMPTS:
        core.add(request(name, {NAME: limits[name]} if name in limits else None))
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while core.has_unfinished():
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    core.check_integrity()
    return tokens, core.metrics()


def steps_of(name: str, limits: dict[str, int]) -> int:
    """Return the steps of a request: its prompt in parts, the last of which yields a token, and one for each other."""
    return -(-len(PROMPTS[name]) // limits.get(name, len(PROMPTS[name]))) + NUM_TOKENS[name] - 1


def all_steps(limits: dict[str, int]) -> int:
    """Return the steps of the engine: "c" follows the first of the others that ends."""
    sooner, later = sorted(steps_of(name, limits) for name in "ab")
    return max(sooner + steps_of("c", limits), later)


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, list[int]], dict[str, Any]]:
    return run(start(has_feature=False), {"a": 3})


def test_an_engine_without_the_feature_ignores_the_value(plain: tuple[dict[str, list[int]], dict[str, Any]]) -> None:
    tokens, metrics = plain
    assert {name: len(ids) for name, ids in tokens.items()} == NUM_TOKENS
    assert metrics["steps"] == all_steps({})
    assert not {"limited_steps", "limited_rows"} & metrics.keys()


@pytest.mark.parametrize("limits", [{}, {"a": 3}, {"b": 2}, {"a": 7, "b": 1}, {"c": 1}], ids=str)
def test_a_limit_changes_the_steps_and_no_token(
    limits: dict[str, int], plain: tuple[dict[str, list[int]], dict[str, Any]]
) -> None:
    """The device counts a limited row once for each step of its request, and not when another request has it."""
    expected, plain_metrics = plain
    tokens, metrics = run(start(has_feature=True), limits)
    assert tokens == expected
    assert metrics["steps"] == all_steps(limits)
    assert (metrics["steps"] > plain_metrics["steps"]) == bool(limits)
    steps = {name: steps_of(name, limits) for name in limits}
    assert metrics["limited_steps"] == steps
    assert metrics["limited_rows"] == sum(steps.values())


@pytest.mark.parametrize("given", [0, -1, "3", 1.5])
def test_a_value_that_is_no_limit_is_refused(given: Any) -> None:
    core = start(has_feature=True)
    with pytest.raises(ValueError, match=f"step_tokens must be a positive number, got {given!r}"):
        core.add(request("a", {NAME: given}))
    assert not core.has_unfinished()
