"""Executor whose ranks are processes on this host, one per device.

Each step is written once to a ring buffer in shared memory that all workers read; one rank writes the results to a
second ring buffer. A step is sent before the previous step has ended. The engine core runs in a separate process, so
that no rank waits while the core runs Python, and the core does not wait while a rank runs Python.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.messages import ControlCall, LateInputs, RunnerOutput, SchedulerOutput
from compiled_engine.parallel.connect import RankLayout
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.channel import send
from compiled_engine.processes.monitor import Monitor, WorkerError
from compiled_engine.processes.ranks import LaunchedWorkers
from compiled_engine.processes.ring import RingReader, RingWriter, await_bell
from compiled_engine.processes.wire import (
    Control,
    GoOn,
    Late,
    Ready,
    StartWorker,
    Step,
    Stop,
    decode_result,
    encode,
)

# A rank counts as hung if a step's result on GPUs takes longer than STEP_S per STEP_TOKENS tokens of the largest step.
STEP_S = 8.0
STEP_TOKENS = 8192
# How long both sides poll before they sleep, if no other step hides the latency between core and workers.
BUSY_S = 0.02
_STOP_S = 10.0


class StepError(RuntimeError):
    """Raised if a step failed in all workers at the same point of its execution. The workers can continue."""


class MultiprocessExecutor:
    """Executor that runs each rank in a worker process.

    workers: the launched workers of this configuration, which `close` ends. If a worker cannot start, raises the
    worker's error, or WorkerError if the worker ended without an error. `submit` and `result` raise WorkerError if a
    worker ends later.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: LaunchedWorkers,
        timeline: Timeline,
        logits_processors: Sequence[str] = (),
        *,
        progress: bool = False,
    ):
        self._layout = layout = RankLayout.of_replica(config.parallel)
        self._workers = workers
        self._step_s = None
        if config.device.type == "cuda":
            self._step_s = STEP_S * max(1.0, config.scheduler.max_num_batched_tokens / STEP_TOKENS)
        takes_turns = config.device.type == "cuda" and config.steps_in_flight == 1
        self._busy_s = BUSY_S if takes_turns else 0.0
        self._numbers = count()
        self._closed = self._started = False
        try:
            self._monitor = Monitor(workers.children, layout, workers.heartbeats)
        except BaseException:
            workers.close()
            raise
        self._results = RingReader(workers.results)
        self._steps = RingWriter(workers.steps, self._no_room)
        self._poll = select.poll()
        for bell in (workers.results.bells[0], self._monitor.bell):
            self._poll.register(bell, select.POLLIN)
        try:
            self._send_start(config, timeline, tuple(logits_processors), progress)
            self.num_blocks = self._agreed(self._monitor.wait_ready())
            self._started = True
        except BaseException:
            self.close()
            raise

    def _send_start(
        self, config: EngineConfig, timeline: Timeline, processors: tuple[str, ...], progress: bool
    ) -> None:
        start = StartWorker(
            config=config,
            logits_processors=processors,
            num_threads=max(1, torch.get_num_threads() // self._layout.size),
            busy_s=self._busy_s,
            progress=progress,
            origin_s=timeline.origin_s,
            spans=tuple(timeline.spans),
        )
        for worker in self._workers.children:
            with suppress(OSError):  # the worker has ended; the monitor has the reason
                send(worker.socket, encode(start))

    def _agreed(self, ready: Sequence[Ready]) -> int:
        """Return the number of KV cache blocks. Raises WorkerError unless all ranks have the same number."""
        for rank, other in enumerate(ready):
            if other != ready[0]:
                name = self._layout.name(rank)
                raise self._monitor.fail(WorkerError(f"{name} has started with {other}, rank 0 with {ready[0]}"))
        return ready[0].num_blocks

    def submit(self, step: SchedulerOutput) -> _PendingResult:
        """Submit a step and return its pending result, see Executor. Raises WorkerError if the workers have ended."""
        self._monitor.check()
        self._steps.write(encode(Step(step)))
        return _PendingResult(self, step.step)

    def sample(self, late: LateInputs) -> None:
        """Sample the newest step, whose late inputs, such as token masks, are now known; see Executor.

        Errors of sampling are raised when the step's result is read. Raises WorkerError if the workers have ended.
        """
        self._monitor.check()
        self._steps.write(encode(Late(late)))

    def _receive(self, step: int) -> RunnerOutput:
        """Wait for the result of the oldest submitted step and return it. step: number of this step.

        If the step failed, raises StepError if the workers continue, otherwise WorkerError.
        """
        self._monitor.expect_result_within(self._step_s)
        result = decode_result(self._results.read(self._wait))
        self._monitor.expect_result_within(None)
        if not isinstance(result, Failed):
            return result
        name = self._layout.name(self._layout.result_rank)
        text = f"{name}: {result.kind}: {result.text}"
        goes_on = self._layout.can_drop_steps and (self._layout.size == 1 or self._monitor.survives(step))
        if goes_on:
            self._steps.write(encode(GoOn()))
        error = StepError(text) if goes_on else WorkerError(text)
        error.add_note(f"in the worker of {name}:\n{result.where}")
        raise error if goes_on else self._monitor.fail(error)

    def _wait(self) -> None:
        """Wait until the eventfd of the results is readable. Raises WorkerError if a worker has failed."""
        await_bell(self._poll, self._busy_s)
        self._monitor.check()

    def _no_room(self) -> None:
        """Read results while the ring buffer of steps is full. Raises WorkerError if a worker has ended.

        The rank that writes results may be waiting for room in its own ring buffer, and then it reads no steps.
        """
        self._monitor.check()
        self._results.take_in()

    def call(self, call: ControlCall) -> list[Any]:
        """Make all workers call the function that `call` names, and return their results in rank order; see Executor.

        Raises ControlError if the call fails on a rank, and WorkerError if the workers have ended.
        """
        number = next(self._numbers)
        expected = self._monitor.expect(number)
        self._steps.write(encode(Control(number, call)))
        answers = [answer.result() for answer in expected]
        errors = [f"{self._layout.name(rank)}: {each.error}" for rank, each in enumerate(answers) if each.error]
        if errors:
            raise ControlError("; ".join(errors))
        return [answer.value for answer in answers]

    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self.call(ControlCall("metrics"))[self._layout.result_rank]
        return metrics

    def close(self) -> None:
        """Wait for the steps in flight, and for all workers to end. Kill workers that do not end in time.

        After a failure, or if the start was not completed, kill the workers at once.
        """
        if self._closed:
            return
        self._closed = True
        self._monitor.close()
        try:
            if self._started and self._monitor.failure is None:
                with suppress(WorkerError):
                    self._steps.write(encode(Stop()))
                    deadline = time.monotonic() + _STOP_S
                    for worker in self._workers.children:
                        worker.wait(max(0.0, deadline - time.monotonic()))
            for worker in self._workers.children:
                worker.kill()  # so that the monitor does not wait for more messages
            self._monitor.end()
        finally:
            self._workers.close()
            self._steps.close()
            self._results.close()


class _PendingResult:
    """The result of a submitted step. Results must be read in the order of the steps."""

    def __init__(self, executor: MultiprocessExecutor, step: int):
        self._executor, self._step = executor, step

    def result(self) -> RunnerOutput:
        """Wait for the result and return it. Raises StepError if the step failed, WorkerError if a rank has ended."""
        return self._executor._receive(self._step)
