"""Processes that compile Triton kernels; they import what they need while this one traces the model.

Threads would do it as well, but they share an interpreter, and most of the work is Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from compiled_engine.kernels.cache_folder import kernel_variables
from compiled_engine.process.worker_pool import WorkerPool

log = logging.getLogger("compiled_engine")


class KernelWorkers:
    """A context whose end ends the processes.

    count: how many, perhaps none; folder: where Triton keeps binaries (None: in its own place); modules: what they
    import at once, so that a kernel's own module finds it imported. Nothing here raises: what no worker compiles, its
    caller does.
    """

    def __init__(self, count: int, folder: Path | None, modules: Sequence[str] = ()):
        self._count, self._modules = count, list(modules)
        self._environment = kernel_variables(folder)
        self._pool: WorkerPool | None = None
        self._target: list[Any] = []
        self.closed = False

    @property
    def started(self) -> bool:
        return self._pool is not None

    def start(self) -> None:
        """Start them, unless they have been."""
        if self._pool is None:
            self._pool = WorkerPool("compiled_engine.kernels.worker", self._count, self._environment)
            self._pool.begin({"modules": self._modules})

    def aim(self, target: Any) -> None:
        """Say for which GPU they compile what is asked for from now on. target: a triton GPUTarget."""
        self._target = [target.backend, target.arch, target.warp_size]

    def compile(self, module: str, name: str, specialization: str) -> bool:
        """Have a kernel compiled, so that Triton finds it in its folder; whether a worker could."""
        if self._pool is None or self.closed:
            return False
        kernel = {"target": self._target, "module": module, "name": name, "specialization": specialization}
        answer = self._pool.ask(kernel)
        if answer is not None and "error" in answer:
            log.debug("%s.%s is compiled in this process: %s", module, name, answer["error"])
        return answer is not None and "error" not in answer

    def close(self) -> None:
        """End them; what is still asked for is not worth compiling then."""
        self.closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
