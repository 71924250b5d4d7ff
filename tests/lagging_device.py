"""A device that lags behind the host, on the CPU: work is queued at launch, and runs when a result is asked for.

It sees what a CUDA stream would: staged writes, published parameters and uploads as they were at the launch, and what
kernels read through unified addressing (known_ids_KL) as it is when they run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from compiled_engine.messages import RunnerOutput
from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.model_runner import Runner
from compiled_engine.sampling.history import History

# What the sampler's host code decides by, at the launch.
FLAGS = (
    "_present_N",
    "_filtered_N",
    "_penalised_N",
    "_added_to_N",
    "_processed_N",
    "_edited_N",
    "_general_N",
    "_remembered_N",
    "_num_logprobs_N",
)


class LaunchedStep:
    def __init__(self, queue: deque[Callable[[], None]]):
        self._queue = queue
        self.step: Any = None

    def result(self) -> RunnerOutput:
        while self.step is None:
            self._queue.popleft()()
        return self.step.result()


def take_snapshot(runner: Runner) -> Callable[[], Callable[[], None]]:
    """A function that puts everything as it is now, and returns one that puts it back."""
    sampler, writes = runner.sampler, runner.states.writes

    def values() -> tuple[Any, ...]:
        additions = sampler._additions
        flags = {name: getattr(sampler, name).copy() for name in FLAGS}
        return (
            writes._writes,
            sampler._table._host.clone(),
            (additions.additions_NC, additions.prefixes_P, additions._changed),
            flags,
        )

    def put(then: tuple[Any, ...]) -> None:
        writes._writes = then[0]
        sampler._table._host.copy_(then[1])
        additions = sampler._additions
        additions.additions_NC, additions.prefixes_P, additions._changed = then[2]
        for name, flags_N in then[3].items():
            getattr(sampler, name)[:] = flags_N

    sampler._additions.publish()
    at_launch = values()

    def restore() -> Callable[[], None]:
        now = values()
        put(at_launch)
        return lambda: put(now)

    return restore


@contextmanager
def lagging_device() -> Iterator[None]:
    """Engines run so meanwhile; they have to finish their steps inside."""
    run, start_counts, start_tail = Runner._run, History.start_counts, History.start_tail
    queue: deque[Callable[[], None]] = deque()

    def lagging_run(runner: Runner, batch: InputBatch, hidden_wanted: bool) -> LaunchedStep:
        restore = take_snapshot(runner)
        runner.states.writes._writes = []
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
        patch.setattr(Runner, "_run", lagging_run)
        patch.setattr(History, "start_counts", later(start_counts))
        patch.setattr(History, "start_tail", later(start_tail))
        yield
