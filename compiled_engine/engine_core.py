"""The engine core: scheduler and runner. Requests in, token deltas out, all plain data; it knows no API object."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from compiled_engine.config import EngineConfig
from compiled_engine.engine_io import EngineOutput, EngineRequest
from compiled_engine.executor import Executor, InProcessExecutor
from compiled_engine.progress import Progress
from compiled_engine.scheduling.scheduler import Scheduler
from compiled_engine.timeline import Timeline


class EngineCore:
    """Not thread-safe: one caller adds, aborts and steps."""

    def __init__(self, config: EngineConfig, progress: Progress):
        timeline = Timeline()
        start_s = timeline.now()
        timeline.add("before the engine", 0.0, start_s)  # the interpreter, imports, and what the caller did
        self.config = config
        self._executor: Executor = InProcessExecutor(config, progress, timeline)
        self._scheduler = Scheduler(config.scheduler, config.cache, self._executor.num_blocks)
        self._seeds = random.Random(config.model.seed)
        self._start_seconds = timeline.now() - start_s

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError if it can never fit or its id is in use.

        A request without a seed gets one here, so that preemption and recompute repeat its tokens.
        """
        if request.sampling_params.seed is None:
            params = replace(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = replace(request, sampling_params=params)
        self._scheduler.add(request)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request now; None if it is not known any more. `stopped`: its output is complete, by a stop string."""
        return self._scheduler.abort(request_id, stopped=stopped)

    def step(self) -> list[EngineOutput]:
        """Schedule, execute, update. If the device fails, the step's requests are aborted and the error is raised."""
        try:
            step = self._scheduler.schedule()
            outputs = self._scheduler.update(step, self._executor.execute(step))
        except BaseException:
            self._scheduler.fail_step()
            raise
        self._scheduler.check_idle()
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for; takes time in proportion to the pool."""
        self._scheduler.check_integrity()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def metrics(self) -> dict[str, Any]:
        """The scheduler's and the runner's figures, and `start_s`, seconds of construction."""
        return {"start_s": self._start_seconds} | self._executor.metrics() | self._scheduler.metrics()

    def close(self) -> None:
        """Free the device."""
        self._executor.close()
