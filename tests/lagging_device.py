"""A device that lags behind the host, on the CPU: work is queued at launch, and runs when a result is asked for.

It sees what a CUDA stream would: staged writes, published parameters and uploads as they were at the launch, and what
kernels read through unified addressing (known_ids_KL) as it is when they run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.messages import RunnerOutput
from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.model_runner import Runner
from compiled_engine.sampling.history import History


class LaunchedStep:
    def __init__(self, queue: deque[Callable[[], None]]):
        self._queue = queue
        self.step: Any = None

    def result(self) -> RunnerOutput:
        while self.step is None:
            self._queue.popleft()()
        return self.step.result()


def host_state(*owners: object) -> Callable[[], None]:
    """A function that puts back what the owners hold now: arrays by their content, tensors, lists and switches."""
    held = [
        (owner, name, value.copy() if isinstance(value, np.ndarray) else value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, np.ndarray | torch.Tensor | list | bool)
    ]

    def put_back() -> None:
        for owner, name, value in held:
            if isinstance(value, np.ndarray):
                vars(owner)[name][:] = value
            else:
                setattr(owner, name, value)

    return put_back


def take_snapshot(runner: Runner) -> Callable[[], Callable[[], None]]:
    """A function that puts all that the host decides by as it is now, and returns one that puts it back."""
    sampler, writes = runner.sampler, runner.states.writes

    def state() -> Callable[[], None]:
        table = {name: values.copy() for name, values in sampler.table.host.items()}
        put_others_back = host_state(sampler, sampler.additions, writes)

        def put_back() -> None:
            for name, values in table.items():
                sampler.table.host[name][:] = values
            put_others_back()

        return put_back

    sampler.additions.publish()
    put_as_at_launch = state()

    def restore() -> Callable[[], None]:
        put_as_now = state()
        put_as_at_launch()
        return put_as_now

    return restore


@contextmanager
def lagging_device() -> Iterator[None]:
    """Engines run so meanwhile; they have to finish their steps inside."""
    run, start_counts, start_tail = Runner.run, History.start_counts, History.start_tail
    queue: deque[Callable[[], None]] = deque()

    def lagging_run(runner: Runner, batch: InputBatch, hidden_wanted: bool) -> LaunchedStep:
        restore = take_snapshot(runner)
        runner.states.writes.discard()
        launched = LaunchedStep(queue)

        def execute() -> None:
            put_back = restore()
            with torch.inference_mode():
                launched.step = run(runner, batch, hidden_wanted)
            put_back()

        queue.append(execute)
        return launched

    def later(function: Callable[..., None]) -> Callable[..., None]:
        def lagging(history: History, row: int, *token_ids: Any) -> None:
            copies = [tuple(ids) if isinstance(ids, list | tuple) else ids for ids in token_ids]
            queue.append(lambda: function(history, row, *copies))

        return lagging

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", lagging_run)
        patch.setattr(History, "start_counts", later(start_counts))
        patch.setattr(History, "start_tail", later(start_tail))
        yield
