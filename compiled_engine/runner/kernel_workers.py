"""Processes that compile Triton kernels; they import what they need while this one traces the model.

Threads would do it as well, but they share an interpreter: on an H200's host sixteen of them compiled 32 kernels in 4.2
seconds, where twelve processes took 1.5 for 36.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

from compiled_engine.graphs.worker_pool import WorkerPool
from compiled_engine.runner.kernel_cache import VARIABLE

log = logging.getLogger("compiled_engine")


class KernelWorkers:
    """A context whose end ends the processes.

    count: how many, perhaps none; folder: where Triton keeps binaries (None: in its own place). Nothing here raises:
    what no worker compiles, its caller does.
    """

    def __init__(self, count: int, folder: Path | None):
        self._count = count
        self._environment = {VARIABLE: str(folder)} if folder else {}
        self._pool: WorkerPool | None = None

    @property
    def started(self) -> bool:
        return self._pool is not None

    def start(self) -> None:
        """Start them, unless they have been."""
        if self._pool is None:
            self._pool = WorkerPool("compiled_engine.runner.kernel_worker", self._count, self._environment)

    def aim(self, target: Any) -> None:
        """Say for which GPU they compile, before the first kernel. target: a triton GPUTarget."""
        if self._pool is not None:
            self._pool.begin({"target": [target.backend, target.arch, target.warp_size]})

    def compile(self, module: str, name: str, specialization: str) -> None:
        """Have a kernel compiled, so that Triton finds it in its folder; without effect if no worker can."""
        if self._pool is None:
            return
        answer = self._pool.ask({"module": module, "name": name, "specialization": specialization})
        if answer is not None and "error" in answer:
            log.debug("%s.%s is compiled in this process: %s", module, name, answer["error"])

    def close(self) -> None:
        """End them."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
