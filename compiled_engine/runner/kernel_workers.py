"""Processes that compile Triton kernels while this one traces the model.

Threads would do it as well, but they share an interpreter: on an H200's host sixteen of them compiled 32 kernels in 4.2
seconds, where twelve processes took 1.5 for 36.
"""

from __future__ import annotations

import logging
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from compiled_engine.graphs.worker_process import WorkerProcess
from compiled_engine.runner.kernel_cache import VARIABLE

log = logging.getLogger("compiled_engine")


class KernelWorkers:
    """A context whose end ends the processes. `start` takes as long as their imports, which nobody waits for.

    count: how many, perhaps none; folder: where Triton keeps binaries (None: in its own place). `wanted`: whether start
    was called.
    """

    def __init__(self, count: int, folder: Path | None):
        self.wanted = False
        self._count = count
        self._environment = {VARIABLE: str(folder)} if folder else {}
        self._started: list[WorkerProcess] = []
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()

    def start(self) -> None:
        """Start them, unless they have been."""
        self.wanted = True
        while len(self._started) < self._count:
            worker = WorkerProcess("compiled_engine.runner.kernel_worker", len(self._started), self._environment)
            self._started.append(worker)

    def aim(self, target: Any) -> None:
        """Say for which GPU they compile; they are idle before. target: a triton GPUTarget."""
        for worker in self._started:
            worker.send({"target": [target.backend, target.arch, target.warp_size]})
            self._idle.put(worker)

    def compile(self, module: str, name: str, specialization: str) -> None:
        """Have a kernel compiled, so that Triton finds it in its folder; without effect if no worker can."""
        if not self._started:
            return
        worker = self._idle.get()
        try:
            answer = worker.ask({"module": module, "name": name, "specialization": specialization})
        finally:
            self._idle.put(worker)
        if "seconds" not in answer:
            log.debug("%s.%s is compiled in this process: %s", module, name, answer)

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._started:
            worker.close()
