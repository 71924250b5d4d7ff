"""Watches the workers: receives their messages, and detects workers that end, fail or hang.

The end or failure of a worker is detected at once, a hang after some seconds.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from compiled_engine.engine.control import Failed, FatalError
from compiled_engine.parallel.connect import RankLayout
from compiled_engine.processes.channel import receive
from compiled_engine.processes.ranks import Heartbeats, WorkerChild, end_all
from compiled_engine.processes.wire import Answered, Ready, StepFailed, decode_from_worker

_LOOK_S = 0.5
# Most seconds counted between two checks: in a longer gap this process was stopped, and perhaps its workers too.
_STOOD_STILL_S = 1.0
_STOPPED_S = 6.0
_LAST_WORDS_S = 1.0
# After a rank fails, how long to look for another rank whose death may be the cause.
_NOTICED_S = 0.2
# Longest time between failures of different ranks in the same step.
_APART_S = 3.0


class WorkerError(FatalError):
    """Raised if a worker has failed, ended, or does not answer. The message says why. The executor is then unusable."""


class Monitor:
    """Watches the workers in a thread, until `end` is called or a worker fails.

    After a failure all workers are ended, and `failure` holds the error. `bell` is an eventfd that becomes readable on
    a failure; `end` closes it.
    """

    def __init__(self, workers: Sequence[WorkerChild], layout: RankLayout, heartbeats: Heartbeats):
        self._workers, self._layout, self._heartbeats = workers, layout, heartbeats
        self._ready: list[Future[Ready]] = [Future() for _ in workers]
        self._answers: dict[tuple[int, int], Future[Answered]] = {}
        self._lock = threading.Lock()
        self._failed_steps: dict[int, dict[int, StepFailed]] = {}
        self._step_failed = threading.Condition(self._lock)
        self._closing = False
        self._looked_s = time.monotonic()
        self._ran_s = 0.0  # clock that stops while this process is stopped
        self._signs: dict[int, tuple[float, float]] = {}  # each rank's last heartbeat, and its arrival in _ran_s
        self._overdue_s = 0.0  # deadline of the awaited result in _ran_s; 0: none
        self.failure: Exception | None = None
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        for rank, worker in enumerate(workers):
            self._selector.register(worker.socket, selectors.EVENT_READ, rank)
        self._selector.register(self.bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="worker monitor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> list[Ready]:
        """Wait until all ranks are ready, and return their messages in rank order.

        Raises WorkerError if a worker ends. If a worker fails to start, raises that worker's error.
        """
        return [future.result() for future in self._ready]

    def expect(self, number: int) -> list[Future[Answered]]:
        """Return one future per rank, for the rank's answer to the control call (wire.Control) with this number.

        Raises the errors of `check`.
        """
        futures: list[Future[Answered]] = [Future() for _ in self._workers]
        with self._lock:
            if self.failure is not None:
                raise self.failure
            for rank, future in enumerate(futures):
                self._answers[rank, number] = future
        return futures

    def expect_result_within(self, seconds: float | None) -> None:
        """Set the deadline of the next result to `seconds` from now.

        None: no result is awaited, or it has no deadline.
        """
        self._overdue_s = 0.0 if seconds is None else self._ran_s + seconds

    def survives(self, step: int) -> bool:
        """Return whether the ranks can continue although step number `step` failed on one of them.

        They can if all ranks fail in the step, after equally many model runs and exchanges, and outside of collectives.
        Waits up to _APART_S for the failures of all ranks.
        """
        with self._step_failed:
            reports = self._failed_steps.setdefault(step, {})
            self._step_failed.wait_for(lambda: len(reports) == len(self._workers) or self.failure is not None, _APART_S)
            self._failed_steps.pop(step, None)
            all_failed = len(reports) == len(self._workers)
            at_one_place = len({report.num_runs for report in reports.values()}) == 1
            return all_failed and at_one_place and all(report.between_runs for report in reports.values())

    def check(self) -> None:
        """Raise the error of the failure, if there has been a failure."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: Exception) -> Exception:
        """End all workers after a failure, and record the error.

        Return the first recorded error, which `check` raises from now on.
        """
        with self._lock:
            if self.failure is None:
                futures: list[Future[Any]] = [*self._ready, *self._answers.values()]
                waiting = [future for future in futures if not future.done()]
                self._answers.clear()
                try:
                    end_all(self._workers)
                finally:  # set last: when `failure` is set, all workers have ended, unless a device blocks one
                    self.failure = error
                    os.eventfd_write(self.bell, 1)
                    self._step_failed.notify_all()
                    for future in waiting:
                        future.set_exception(error)
            return self.failure

    def close(self) -> None:
        """Record that the workers are about to end. From now on, the end of a worker is not a failure."""
        self._closing = True

    def end(self) -> None:
        """Stop watching. Must be called after the workers have ended, before their connections are closed.

        From now on `check` and `expect` raise.
        """
        with self._lock:
            if self.failure is None:
                self.failure = WorkerError("the workers have been told to stop")
                os.eventfd_write(self.bell, 1)
        if threading.current_thread() is not self._thread:  # the thread itself may garbage-collect an engine
            self._thread.join()
        os.close(self.bell)

    def _watch(self) -> None:
        left = set(range(len(self._workers)))
        while left and self.failure is None:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is not None and not self._take(key.data):
                    self._selector.unregister(key.fileobj)
                    left.discard(key.data)
            if not self._closing and self.failure is None:
                self._look_for_stopped()
        self._selector.close()

    def _take(self, rank: int) -> bool:
        """Process the next message of a rank's worker. Return False if the worker has ended."""
        worker, name = self._workers[rank], self._layout.name(rank)
        try:
            message = decode_from_worker(receive(worker.socket))
        except EOFError:
            if not self._closing:
                self.fail(WorkerError(f"the worker of {name} {worker.how_it_ended(_LAST_WORDS_S)}"))
            return False
        match message:
            case Ready():
                self._ready[rank].set_result(message)
            case Answered(number):
                with self._lock:
                    future = self._answers.pop((rank, number), None)
                if future is not None:
                    future.set_result(message)
            case StepFailed(step):
                with self._step_failed:
                    self._failed_steps.setdefault(step, {})[rank] = message
                    self._step_failed.notify_all()
                if rank != self._layout.result_rank:
                    timer = threading.Timer(_APART_S, self._fail_unless_settled, (step, rank, message.failed))
                    timer.daemon = True
                    timer.start()
            case Failed():
                self.fail(self._killed_besides(rank) or self._error(message, rank))
        return True

    def _killed_besides(self, rank: int) -> WorkerError | None:
        """Return the error of another worker that was killed, or None.

        Collectives fail on this worker if another worker dies, so that worker's death is the cause.
        """
        deadline = time.monotonic() + _NOTICED_S
        for other, worker in enumerate(self._workers):
            if other != rank and worker.is_killed(max(0.0, deadline - time.monotonic())):
                return WorkerError(f"the worker of {self._layout.name(other)} {worker.how_it_ended(0.0)}")
        return None

    def _error(self, failed: Failed, rank: int) -> Exception:
        """Return the error to raise for a rank's failure.

        If the rank failed to start, this is the rank's own exception, which may concern a user's option. Otherwise it
        is a WorkerError.
        """
        name = self._layout.name(rank)
        if self._ready[rank].done():
            error: Exception = WorkerError(f"{name}: {failed.kind}: {failed.text}")
            error.add_note(f"in the worker of {name}:\n{failed.where}")
            return error
        return failed.as_exception(f"the worker of {name}", f"{name}: ")

    def _fail_unless_settled(self, step: int, rank: int, failed: Failed) -> None:
        """Fail the executor because of a rank's failure in a step, unless `survives` has handled the step.

        Without this, the rank that writes the results might wait for the failed rank without end.
        """
        with self._lock:
            is_settled = step not in self._failed_steps
        if not is_settled and not self._closing:
            self.fail(self._error(failed, rank))

    def _look_for_stopped(self) -> None:
        now = time.monotonic()
        self._ran_s += min(now - self._looked_s, _STOOD_STILL_S)
        self._looked_s = now
        for rank, worker in enumerate(self._workers):
            limit_s = _LAST_WORDS_S if worker.is_dying() else _STOPPED_S
            if self._silent_s(rank) > limit_s:
                name = self._layout.name(rank)
                self.fail(WorkerError(f"the worker of {name} has given no sign of life for {limit_s:.0f} s"))
                return
        if 0.0 < self._overdue_s < self._ran_s:
            self.fail(WorkerError("a step has taken far longer than any step can: a rank does not answer"))

    def _silent_s(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat.

        While the rank starts, code without heartbeats may run for long. The result is then the seconds since its
        process was first found stopped, and 0 if it is not stopped.
        """
        if self._ready[rank].done():
            sign = self._heartbeats.last_s(rank)
        else:
            sign = -1.0 if self._workers[rank].is_stopped() else self._ran_s
        last, since = self._signs.get(rank, (None, 0.0))
        if sign != last:
            self._signs[rank] = sign, self._ran_s
            return 0.0
        return self._ran_s - since
