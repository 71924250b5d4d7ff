"""The engine core: scheduler and runner. Requests in, token deltas out, all plain data; it knows no API object."""

from __future__ import annotations

import random
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from compiled_engine.config import EngineConfig
from compiled_engine.core.executor import Executor, PendingOutput
from compiled_engine.messages import EngineOutput, EngineRequest, SchedulerOutput, StepOutputs
from compiled_engine.process.step_clock import StepClock
from compiled_engine.sampling.params import derived
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.scheduling.scheduler import Scheduler


class EngineCore:
    """Not thread-safe: one caller adds, aborts and steps.

    num_slots: tokens that the KV cache holds. clock: to be started by who measures; its laps are schedule, prepare,
    launch, wait and output. start_s: seconds that the start took.
    """

    def __init__(self, config: EngineConfig, executor: Executor, clock: StepClock, start_s: float = 0.0):
        self.config = config
        self.clock = clock
        self.executor = executor
        self._free = weakref.finalize(self, executor.close)  # if nobody calls `close`
        self._free.atexit = False
        self._steps_in_flight = 2 if config.scheduler.async_scheduling else 1
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            executor.num_blocks,
            config.model.vocab_size,
            self._steps_in_flight,
        )
        self.num_slots = executor.num_blocks * config.cache.block_size
        self._pending: deque[tuple[SchedulerOutput, PendingOutput]] = deque()  # the oldest step first
        self._seeds = random.Random(config.model.seed)
        self._start_s = start_s

    def add(self, request: EngineRequest, token_mask: TokenMask | None = None) -> None:
        """Queue a request; `token_mask` says which of its tokens may come.

        Raises ValueError if the request can never fit, if its id is in use, or if its parameters hold a token mask.

        A request without a seed gets one here, so that preemption and recompute repeat its tokens.
        """
        if request.sampling_params.token_mask is not None:
            raise ValueError("sampling_params.token_mask must be None in an EngineRequest: give the mask to add")
        if request.sampling_params.seed is None:
            params = derived(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = replace(request, sampling_params=params)
        self._scheduler.add(request, token_mask)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request now; None if it is not known any more. `stopped`: its output is complete, by a stop string."""
        return self._scheduler.abort(request_id, stopped=stopped)

    def step(self) -> StepOutputs:
        """Launch what can be launched, then take in the oldest step; its outputs.

        With async scheduling the device has the next step already while this one's result is taken in. A step that
        nobody waits for any more (all its requests ended after its launch) may stay behind; a later call takes it
        in and has no outputs. A request whose token mask fails ends with finish_reason "error"; the others go on.

        If a step fails, the requests that run are aborted and the error is raised; those that wait go on.
        """
        try:
            while len(self._pending) < self._steps_in_flight and (step := self._scheduler.schedule()) is not None:
                self.clock.lap("schedule")
                self._pending.append((step, self.executor.submit(step)))
                self.clock.lap("launch")
            if not self._pending:
                return StepOutputs()
            step, pending = self._pending.popleft()
            result = pending.result()
            outputs = self._scheduler.update(step, result)
            self.clock.lap("output")
        except BaseException:
            self._scheduler.fail_step()
            self._drain()
            raise
        self._scheduler.check_idle()
        return outputs

    def _drain(self) -> None:
        """Wait for the steps that are launched. Nobody wants their results, nor to hear that they failed."""
        while self._pending:
            _, pending = self._pending.popleft()
            with suppress(Exception):
                pending.result()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for; takes time in proportion to the pool."""
        self._scheduler.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Let no later request find what the prefix cache holds now; requests that run go on as they are."""
        self._scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def metrics(self) -> dict[str, Any]:
        """The scheduler's and the runner's figures, and `start_s`, seconds of construction."""
        return {"start_s": self._start_s} | self.executor.metrics() | self._scheduler.metrics()

    def close(self) -> None:
        """Wait for the device and free it. So does dropping the last reference."""
        self._drain()
        self._free()
