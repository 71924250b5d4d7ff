"""Worker processes for callers in several threads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Lock
from typing import Any

from compiled_engine.graphs.worker_process import WorkerEnded, WorkerProcess

log = logging.getLogger("compiled_engine")


class WorkerPool:
    """Processes that run `main()` of a module. What cannot be started, or ends, is done without; there may be none.

    They start at once, so their imports run beside whatever the caller does before it asks.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str] | None = None):
        self._workers: list[WorkerProcess] = []
        self._idle: SimpleQueue[WorkerProcess | None] = SimpleQueue()
        self._lost, self._lock = 0, Lock()
        try:
            for number in range(count):
                self._workers.append(WorkerProcess(module, number, environment))
        except OSError as error:
            log.warning("%d of %d worker processes are started: %s", len(self._workers), count, error)

    def __len__(self) -> int:
        """How many were started."""
        return len(self._workers)

    def begin(self, message: dict[str, Any]) -> None:
        """Tell all of them what holds for every question; to be called once, before `ask`."""
        for worker in self._workers:
            worker.send(message)
            self._idle.put(worker)
        if not self._workers:
            self._idle.put(None)

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of whichever is idle first, with its number as "worker"; None if it ended, or if all have."""
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)  # for the next one to ask
            return None
        try:
            answer = worker.ask(message)
        except WorkerEnded as error:
            log.warning("%s", error)
            with self._lock:
                self._lost += 1
                if self._lost == len(self._workers):
                    self._idle.put(None)
            return None
        self._idle.put(worker)
        return answer | {"worker": worker.number}

    def close(self) -> None:
        """End them."""
        for worker in self._workers:
            worker.close()
