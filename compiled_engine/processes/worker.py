"""The part of a worker's program that needs PyTorch: create the runner, then execute the ring buffer's messages."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.executor import InProcessExecutor, PendingOutput
from compiled_engine.engine.messages import ControlCall, LateInputs, RunnerOutput, SchedulerOutput
from compiled_engine.features.registry import make_features
from compiled_engine.parallel.connect import Connections, RankLayout, connect, join_ranks
from compiled_engine.parallel.gloo import leave
from compiled_engine.parallel.group import in_group
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.channel import receive, send
from compiled_engine.processes.ranks import Heartbeats
from compiled_engine.processes.ring import RingDescriptors, RingReader, RingWriter
from compiled_engine.processes.wire import (
    Answered,
    Control,
    FromWorker,
    GoOn,
    Late,
    Ready,
    StartWorker,
    Step,
    StepFailed,
    Stop,
    decode_start,
    decode_to_worker,
    encode,
    encode_result,
)
from compiled_engine.sampling.logits_processor import resolve_logits_processors


def serve(connection: socket.socket, device: str, rank: int, folder: Path, descriptors: Sequence[int]) -> None:
    """Run a rank until it gets a Stop message. If it fails, send the error over `connection` and exit with code 1.

    connection: the socket to the WorkerChild that started this process. device: "cuda" or "cpu". folder: an empty
    folder, through which the ranks find each other. descriptors: the memory of the heartbeats, of the steps' ring
    buffer and of the results' ring buffer, then the doorbell of the results, then the ranks' doorbells for steps.
    """
    heartbeats, steps_memory, results_memory, results_bell, *steps_bells = descriptors
    try:
        # Work that needs no configuration is done first.
        join_ranks(device, rank, len(steps_bells), folder)
        start = decode_start(receive(connection))
        layout = RankLayout.of_replica(start.config.parallel)
        steps = RingReader(RingDescriptors(steps_memory, tuple(steps_bells)), rank, start.busy_s)
        results = None
        if rank == layout.result_rank:
            results = RingWriter(RingDescriptors(results_memory, (results_bell,)), lambda: None)
        torch.set_num_threads(start.num_threads)
        timeline = Timeline(start.origin_s, start.spans)
        so_far = max((span.start_s + span.seconds for span in start.spans), default=0.0)
        timeline.add("start the workers", so_far, timeline.now() - so_far)
        with timeline.span("connect the ranks"):
            connections = connect(start.config, rank)
        with in_group(connections.group):
            worker = Worker(start, rank, timeline, connections, connection, results)
            _send(connection, Ready(worker.executor.num_blocks, worker.executor.metrics()["cache_key"]))
            Heartbeats(layout.size, heartbeats).beat(rank)
            worker.run(steps)
    except BaseException as error:
        try:
            _send(connection, Failed.of(error))
        except OSError:  # the executor is gone
            shutil.rmtree(folder, ignore_errors=True)
        # An orderly exit would wait for work on the device, and for other ranks.
        os._exit(1)


class Worker:
    """Executes the steps and control calls of one rank."""

    def __init__(
        self,
        start: StartWorker,
        rank: int,
        timeline: Timeline,
        connections: Connections,
        connection: socket.socket,
        results: RingWriter | None,
    ):
        config = start.config
        progress = RichProgress() if start.progress and rank == 0 else SilentProgress()
        processors = resolve_logits_processors(start.logits_processors)
        link = connections.link
        clock, of_ranks = StepClock(config.device), (processors, connections.group, link.stage if link else None)
        self.executor = InProcessExecutor(config, progress, timeline, clock, make_features(link), *of_ranks)
        self._group, self._connection, self._results = connections.group, connection, results
        self._samples = RankLayout.of_replica(config.parallel).samples(rank)
        self._failure: Exception | None = None
        self._late: tuple[int, PendingOutput] | None = None  # the last step and its number, if it awaits late inputs
        # Results are written by a thread if steps overlap; on a CPU a step is complete when its launch returns.
        self._pending: queue.SimpleQueue[PendingOutput] | None = None
        if results is not None and config.steps_in_flight > 1 and config.device.type == "cuda":
            self._pending = queue.SimpleQueue()
            threading.Thread(target=self._write_results, args=(self._pending,), name="results", daemon=True).start()

    def run(self, steps: RingReader) -> None:
        """Execute the messages from `steps` until a Stop. If a step fails, the executor decides whether to continue."""
        while True:
            match decode_to_worker(steps.read()):
                case Step(step):
                    self._execute(step)
                case Late(inputs):
                    self._sample(inputs)
                case GoOn():
                    self._failure = None
                case Control(number, call):
                    _send(self._connection, self._answer(number, call))
                case Stop():
                    self.executor.close()
                    self._group.close()
                    leave()
                    return

    def _execute(self, step: SchedulerOutput) -> None:
        self._report_missing_inputs()
        pending = self._guarded(step.step, lambda: self.executor.submit(step))
        if step.samples_late and self._samples and not isinstance(pending, _Raised):
            self._late = step.step, pending
        else:
            self._send_result(pending)

    def _sample(self, inputs: LateInputs) -> None:
        """Sample the step that waits for these inputs, such as token masks. If the step has failed, do nothing."""
        if self._late is None:
            return
        (number, pending), self._late = self._late, None

        def sampled() -> PendingOutput:
            self.executor.sample(inputs)
            return pending

        self._send_result(self._guarded(number, sampled))

    def _report_missing_inputs(self) -> None:
        """If a step still waits for inputs of its sampling (see `_sample`), send its result, which reports this."""
        if self._late is not None:
            (_, pending), self._late = self._late, None
            self._send_result(pending)

    def _guarded(self, number: int, launch: Callable[[], PendingOutput]) -> PendingOutput:
        """Launch step `number` by calling `launch`, and return the step's pending output.

        A failure is reported to the executor, and returned as a pending output that raises the error. Later steps fail
        with the same error, until the executor sends `GoOn`.
        """
        try:
            if self._failure is not None:  # of an earlier step
                raise self._failure
            return launch()
        except Exception as error:
            self._failure = error
            runner = self.executor.runner
            between = runner.runs_begun == runner.runs_ended
            place = runner.runs_begun + runner.sampler.num_exchanges
            _send(self._connection, StepFailed(number, Failed.of(error), between, place))
            return _Raised(error)

    def _send_result(self, pending: PendingOutput) -> None:
        if self._pending is not None:
            self._pending.put(pending)
        elif self._results is not None:
            self._results.write(encode_result(_outcome(pending)))

    def _write_results(self, launched: queue.SimpleQueue[PendingOutput]) -> None:
        assert self._results is not None
        while True:
            self._results.write(encode_result(_outcome(launched.get())))

    def _answer(self, number: int, call: ControlCall) -> Answered:
        try:
            (value,) = self.executor.call(call)
        except ControlError as error:
            return Answered(number, error=str(error))
        if call.name == "metrics":
            value = value | {"collectives": self._group.kind}
        return Answered(number, value)


class _Raised:
    """Pending output of a step whose launch or late sampling failed. `result` raises the error."""

    def __init__(self, error: Exception):
        self._error = error

    def result(self) -> RunnerOutput:
        raise self._error


def _send(connection: socket.socket, message: FromWorker) -> None:
    send(connection, encode(message))


def _outcome(pending: PendingOutput) -> RunnerOutput | Failed:
    try:
        return pending.result()
    except Exception as error:
        return Failed.of(error)
