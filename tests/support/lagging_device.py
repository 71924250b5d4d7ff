"""A device that lags behind the host, on the CPU: work is queued at launch, and runs when a result is asked for.

It sees what a CUDA stream would: staged writes as they were at the launch, what kernels read through unified addressing
(all_token_ids_KL) as it is when they run, and copies of recurrent states between the steps that they were launched
between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import LateInputs, RunnerOutput
from compiled_engine.engine.runner import Runner
from compiled_engine.engine.step_sampling import LateStep
from compiled_engine.features.recurrence.state_rows import StateRows
from compiled_engine.features.speculation.drafter import Drafter
from compiled_engine.features.structured.extras import NAME, TokenMasks, masks_in


class LaunchedStep:
    def __init__(self, queue: deque[Callable[[], None]]):
        self._queue = queue
        self.step: Any = None

    def result(self) -> RunnerOutput:
        while self.step is None or (isinstance(self.step, LateStep) and self.step.sampled is None):
            self._queue.popleft()()
        return self.step.result()


def host_state(*owners: object) -> Callable[[], None]:
    """Return a function that restores what the owners hold now: arrays by content, dicts, lists and flags."""
    held = [
        (owner, name, value.copy() if isinstance(value, np.ndarray | dict) else value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, np.ndarray | dict | list | bool)
    ]

    def put_back() -> None:
        for owner, name, value in held:
            if isinstance(value, np.ndarray):
                vars(owner)[name][:] = value
            else:
                setattr(owner, name, value)

    return put_back


def take_snapshot(runner: Runner) -> Callable[[], Callable[[], None]]:
    """Record the host's state now. Returns a function that restores it, and returns one that undoes this."""
    owners = (runner.sampler, runner.states.writes)
    put_as_at_launch = host_state(*owners)
    of_step = [(each, each._drafting) for each in runner._hooks.features if isinstance(each, Drafter)]

    def restore() -> Callable[[], None]:
        put_as_now = host_state(*owners)
        put_as_at_launch()
        for feature, drafting in of_step:
            feature._drafting = drafting
        return put_as_now

    return restore


@contextmanager
def lagging_device() -> Iterator[None]:
    """Make engines lag within a block. They must finish their steps inside the block."""
    run, sample, copy_state = Runner.run, Runner.sample, StateRows._copy
    queue: deque[Callable[[], None]] = deque()
    last: list[LaunchedStep] = []

    def lagging_run(
        runner: Runner, batch: InputBatch, hidden_wanted: bool, *, samples_late: bool = False
    ) -> LaunchedStep:
        restore = take_snapshot(runner)
        runner.states.writes.discard()
        launched = LaunchedStep(queue)
        last[:] = [launched]

        def execute() -> None:
            put_back = restore()
            with torch.inference_mode():
                launched.step = run(runner, batch, hidden_wanted, samples_late=samples_late)
            runner._late = None
            put_back()

        queue.append(execute)
        return launched

    def lagging_sample(runner: Runner, late: LateInputs) -> None:
        restore, (launched,) = take_snapshot(runner), last
        masks = masks_in(late.extras[NAME])
        as_at_launch = LateInputs({NAME: TokenMasks(masks.request_ids, memoryview(bytes(masks.words)))})

        def execute() -> None:
            put_back = restore()
            runner._late = launched.step
            sample(runner, as_at_launch)
            put_back()

        queue.append(execute)

    def lagging_copy(rows: StateRows, source: int, target: int) -> None:
        def execute() -> None:
            with torch.inference_mode():
                copy_state(rows, source, target)

        queue.append(execute)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", lagging_run)
        patch.setattr(Runner, "sample", lagging_sample)
        patch.setattr(StateRows, "_copy", lagging_copy)
        yield
        while queue:  # copies behind the last step
            queue.popleft()()
