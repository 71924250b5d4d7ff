"""Triton kernels are compiled before they are launched, side by side, in processes of their own.

The processes import what they need while this one traces the model. Threads would compile as well, but they share an
interpreter, and most of the work is Python.

Triton names a kernel's binary after digests of its own files, some hundred megabytes, and after the version of its
assembler, which it asks by running it. Both happen once in a process, and leave Python's lock to others, so a thread
makes them in parallel with what a start does before its first kernel.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from compiled_engine.kernels.cache_folder import kernel_variables
from compiled_engine.kernels.kernel_digest import digest_helpers_first
from compiled_engine.process.in_background import InBackground
from compiled_engine.process.init_cuda import triton_digest
from compiled_engine.process.worker_pool import WorkerPool

log = logging.getLogger("compiled_engine")
PACKAGE = "compiled_engine."
# Triton has one hook for the whole process.
_HOOK = threading.Lock()
# Python 3.11 counts how deep ast.parse is once for all threads, and raises SystemError where two are at it.
PARSES_ALONE = sys.version_info < (3, 12)
_PARSING: AbstractContextManager[Any] = threading.Lock() if PARSES_ALONE else nullcontext()


@cache
def triton_digests(device: torch.device) -> InBackground[None]:
    """The first call starts a thread, and every call gives the same one. Its `result` waits, and raises nothing."""
    return InBackground(lambda: _digest(device))


def _digest(device: torch.device) -> None:
    triton_digest(device.index or 0).result()
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()  # unless it was made above
        major, minor = torch.cuda.get_device_capability(device)
        make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()
    except Exception:  # another version, or a damaged one: the first kernel will do it, and say what is wrong
        return


class KernelWorkers:
    """Processes that compile kernels, ended with this context.

    count: number of processes, possibly 0; folder: of Triton's binaries (None: Triton's default); modules: imported at
    once, before a kernel's own module needs them. Nothing here raises: the caller compiles what no worker does.
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
        """Set the GPU for which kernels are compiled from now on. target: a triton GPUTarget."""
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
        """End the processes; pending compilations are dropped."""
        self.closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def compiled_by(workers: KernelWorkers, threads: Executor) -> Iterator[KernelCollector]:
    """Within this context launches of the engine's kernels launch nothing. A kernel that is not compiled yet is
    compiled by `workers`, and one of `threads` waits for that.

    What such a launch would have written is not there, so a kernel that is compiled already would read it. Launches of
    other threads wait for a worker, and are made; those of other kernels do not change. One engine at
    a time.
    """
    import triton  # not installed everywhere

    with _HOOK:
        workers.aim(triton.runtime.driver.active.get_current_target())
        before = triton.knobs.runtime.jit_cache_hook
        kernels = KernelCollector(workers, threads, before)
        triton.knobs.runtime.jit_cache_hook = kernels
        try:
            yield kernels
        finally:
            triton.knobs.runtime.jit_cache_hook = before


class KernelCollector:
    """The kernels launched by the creating thread: Triton's hook, replacing `before`."""

    def __init__(self, workers: KernelWorkers, threads: Executor, before: Callable[..., bool | None] | None):
        self._workers, self._threads, self._before = workers, threads, before
        self._caller = threading.get_ident()
        self._own: set[int] = set()  # threads that run what has to be launched
        self._known: set[tuple[int, str]] = set()
        self._compiling: list[tuple[Any, str, Future[bool]]] = []

    def launched(self, part: Callable[[], Any]) -> Future[Any]:
        """Run a part with real launches in one of the threads. It ends if the start has failed."""

        def run() -> None:
            self._own.add(threading.get_ident())
            part()

        return self._threads.submit(run)

    def leaves_out_launches(self) -> bool:
        """Return whether launches of the calling thread are skipped."""
        return threading.get_ident() == self._caller

    def __call__(
        self, *, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **about: Any
    ) -> bool | None:
        """Triton calls it before it compiles; True: do not."""
        specialization = compile["specialization_data"]
        asks = self.leaves_out_launches()
        if fn.module.startswith(PACKAGE) and (asks or not is_manual_warmup):
            if asks:
                if (id(fn.jit_function), key) not in self._known:  # a hash of it would parse its source
                    self._known.add((id(fn.jit_function), key))
                    future = self._threads.submit(self._workers.compile, fn.module, fn.name, specialization)
                    self._compiling.append((fn.jit_function, specialization, future))
                return True
            if self._workers.closed and threading.get_ident() in self._own:
                raise CancelledError("the start for which this kernel is compiled has failed")
            is_compiled = self._workers.compile(fn.module, fn.name, specialization)
            with _PARSING:
                digest_helpers_first(fn.jit_function)  # once, from the parsed source
                if PARSES_ALONE and not is_compiled:
                    fn.jit_function.preload(specialization)
        everything = {"key": key, "fn": fn, "compile": compile, "is_manual_warmup": is_manual_warmup, **about}
        return self._before(**everything) if self._before is not None else None

    def load(self) -> list[Future[Any]]:
        """Load the collected kernels, and compile those that no worker has compiled, unless the workers are closed."""
        return [self._threads.submit(self._load, *kernel) for kernel in self._compiling]

    def _load(self, jit_function: Any, specialization: str, compiling: Future[bool]) -> Any:
        compiling.result()
        if self._workers.closed:
            return None
        with _PARSING:
            digest_helpers_first(jit_function)
            kernel = jit_function.preload(specialization)
        return kernel and kernel.run  # which loads it, and builds its launcher with a C compiler
