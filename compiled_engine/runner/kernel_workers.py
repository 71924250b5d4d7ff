"""Processes that compile Triton kernels; they import what they need while this one traces the model.

Threads would do it as well, but they share an interpreter: on an H200's host sixteen of them compiled 32 kernels in 4.2
seconds, where twelve processes took 1.5 for 36.
"""

from __future__ import annotations

import logging
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Any

from compiled_engine.graphs.worker_process import WorkerProcess
from compiled_engine.runner.kernel_cache import VARIABLE

log = logging.getLogger("compiled_engine")

# A cold start has 40 to 50 kernels.
MOST_WORKERS = 8


class KernelWorkers:
    """A context whose end ends the processes. `start` takes as long as their imports, which nobody waits for.

    count: how many, perhaps none; folder: where Triton keeps binaries (None: in its own place). `wanted`: whether start
    was called. Nothing here raises: what no worker compiles, its caller does.
    """

    def __init__(self, count: int, folder: Path | None):
        self.wanted = False
        self._count = min(count, MOST_WORKERS)
        self._environment = {VARIABLE: str(folder)} if folder else {}
        self._started: list[WorkerProcess] = []
        self._lost, self._lock = 0, Lock()
        self._idle: SimpleQueue[WorkerProcess | None] = SimpleQueue()

    def start(self) -> None:
        """Start them, unless they have been."""
        if self.wanted:
            return
        self.wanted = True
        try:
            for number in range(self._count):
                worker = WorkerProcess("compiled_engine.runner.kernel_worker", number, self._environment)
                self._started.append(worker)
        except OSError as error:
            log.warning("kernels are compiled by %d processes, more cannot be started: %s", len(self._started), error)

    def aim(self, target: Any) -> None:
        """Say for which GPU they compile; they are idle before. target: a triton GPUTarget."""
        for worker in self._started:
            worker.send({"target": [target.backend, target.arch, target.warp_size]})
            self._idle.put(worker)
        if not self._started:
            self._idle.put(None)

    def compile(self, module: str, name: str, specialization: str) -> None:
        """Have a kernel compiled, so that Triton finds it in its folder; without effect if no worker can."""
        worker = self._idle.get()
        if worker is None:  # there are none any more, for nobody
            self._idle.put(None)
            return
        try:
            answer = worker.ask({"module": module, "name": name, "specialization": specialization})
        except (OSError, ValueError) as error:  # closed meanwhile
            answer = {"unknown": str(error)}
        if "unknown" in answer:
            log.warning("kernels are compiled without a worker: %s", answer["unknown"])
            with self._lock:
                self._lost += 1
                if self._lost == len(self._started):
                    self._idle.put(None)
            return
        self._idle.put(worker)
        if "error" in answer:
            log.debug("%s.%s is compiled in this process: %s", module, name, answer["error"])

    def close(self) -> None:
        """End them."""
        for worker in self._started:
            worker.close()

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
