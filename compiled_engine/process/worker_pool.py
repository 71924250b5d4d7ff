"""Worker processes for callers in several threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Lock
from typing import Any

from compiled_engine.process.worker_process import Worker, WorkerEnded, WorkerProcesses

log = logging.getLogger("compiled_engine")


class WorkerPool:
    """Processes that run `main()` of a module. What cannot be started, or ends, is done without; there may be none.

    They start at once; from `begin` on their imports run beside whatever the caller does before it asks.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str] | None = None):
        self._processes: WorkerProcesses | None = None
        self._lock = Lock()
        self._idle: deque[Worker] = deque()
        self._waiting: deque[Future[Worker | None]] = deque()  # the first to ask is the first to get one
        self._left = 0
        self._closed = False
        try:
            self._processes = WorkerProcesses(module, count, environment) if count else None
        except OSError as error:
            log.warning("no worker process is started: %s", error)

    def __len__(self) -> int:
        """How many were started."""
        return len(self._processes.workers) if self._processes else 0

    def begin(self, order: dict[str, Any]) -> None:
        """Tell them what holds for every question; to be called once, before `ask`."""
        if self._processes is None:
            return
        self._processes.begin(order)
        with self._lock:
            self._left = len(self._processes.workers)
            self._idle.extend(self._processes.workers)

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of whichever is idle first, with its number as "worker"; None if it ended, or if all have.

        For threads that nobody interrupts: one that is would take its worker along.
        """
        worker = self._take()
        if worker is None:
            return None
        try:
            answer = worker.ask(message)
        except WorkerEnded as error:
            log.log(logging.DEBUG if self._closed else logging.WARNING, "%s", error)
            self._lose()
            return None
        self._give(worker)
        return answer | {"worker": worker.number}

    def _take(self) -> Worker | None:
        with self._lock:
            if not self._left or self._closed:
                return None
            if self._idle:
                return self._idle.popleft()
            turn: Future[Worker | None] = Future()
            self._waiting.append(turn)
        return turn.result()

    def _give(self, worker: Worker) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set_result(worker)
            else:
                self._idle.append(worker)

    def _lose(self) -> None:
        with self._lock:
            self._left -= 1
            while not self._left and self._waiting:
                self._waiting.popleft().set_result(None)

    def close(self) -> None:
        """End them. What is asked meanwhile has no answer."""
        self._closed = True
        if self._processes is not None:
            self._processes.close()
