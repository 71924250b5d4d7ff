"""Compiles Triton kernels in parallel worker processes before they are launched.

The workers import their modules while this process traces the model. Threads would help little, since they share the
GIL and most of the work is in Python.

The name of a kernel's binary depends on a digest of Triton's own files, some hundred megabytes, and on the version of
its assembler, for which Triton runs the assembler. Both are computed once per process and release the GIL, so a thread
computes them while the engine prepares its first kernel.
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
# Triton has a single hook for the whole process.
_HOOK = threading.Lock()
# Python 3.11 has one recursion counter of ast.parse for all threads, and raises SystemError if two threads parse.
PARSES_ALONE = sys.version_info < (3, 12)
_PARSING: AbstractContextManager[Any] = threading.Lock() if PARSES_ALONE else nullcontext()


@cache
def triton_digests(device: torch.device) -> InBackground[None]:
    """Start to compute Triton's digests in a thread, and return an object whose `result` waits until they are computed.

    `result` never raises. Later calls for a device return the same object. The digests are those of Triton's files and
    of its compiler for `device`.
    """
    return InBackground(lambda: _digest(device))


def _digest(device: torch.device) -> None:
    triton_digest(device.index or 0).result()
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()  # cached if it was computed above
        major, minor = torch.cuda.get_device_capability(device)
        make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()
    except Exception:  # an unknown or damaged version; the first kernel computes it again and reports the error
        return


class KernelWorkers:
    """Worker processes that compile kernels. As a context manager, ends them on exit.

    count: number of processes, possibly 0.
    folder: where Triton's binaries are stored; None: where Triton's own settings say.
    modules: imported by the workers when they start, so that the first kernels need not wait for them.

    If a worker fails, no method raises: the caller compiles the kernels that no worker has compiled.
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
        """Start the processes, unless they have been started before."""
        if self._pool is None:
            self._pool = WorkerPool("compiled_engine.kernels.worker", self._count, self._environment)
            self._pool.begin({"modules": self._modules})

    def aim(self, target: Any) -> None:
        """Set the GPU to compile for. target: a triton GPUTarget."""
        self._target = [target.backend, target.arch, target.warp_size]

    def compile(self, module: str, name: str, specialization: str) -> bool:
        """Compile the kernel `module`.`name` in a worker, wait until it has ended, and return whether it succeeded.

        specialization: as Triton passes it to its jit_cache_hook. The worker stores the binary in the folder. Returns
        False if the compilation failed or if there is no worker.
        """
        if self._pool is None or self.closed:
            return False
        kernel = {"target": self._target, "module": module, "name": name, "specialization": specialization}
        answer = self._pool.ask(kernel)
        if answer is not None and "error" in answer:
            log.debug("%s.%s is compiled in this process: %s", module, name, answer["error"])
        return answer is not None and "error" not in answer

    def close(self) -> None:
        """End the processes. Pending and later calls of `compile` return False."""
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
    """Within this context, let `workers` compile the engine's kernels that the calling thread launches.

    The workers compile in parallel, and `threads` wait for the workers. In the calling thread, launches of the engine's
    kernels are skipped, even of kernels that are compiled already: other kernels, which would have written their
    inputs, did not run. In other threads, a kernel is launched once a worker has compiled it. Kernels of other packages
    are launched as usual. Yields the hook that does this. A second engine that enters this context waits until the
    first has left it.
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
    """A hook that Triton calls when it is about to compile a kernel (jit_cache_hook).

    When the thread that created the hook launches one of the engine's kernels, a worker compiles the kernel, and the
    hook collects it for `load`. Kernels of other packages are passed to `before`, the previous hook; None: there was
    none.
    """

    def __init__(self, workers: KernelWorkers, threads: Executor, before: Callable[..., bool | None] | None):
        self._workers, self._threads, self._before = workers, threads, before
        self._caller = threading.get_ident()
        self._own: set[int] = set()  # threads that run parts with real launches
        self._known: set[tuple[int, str]] = set()
        self._compiling: list[tuple[Any, str, Future[bool]]] = []

    def launched(self, part: Callable[[], Any]) -> Future[Any]:
        """Run the function `part` in another thread, where launches are not skipped, and return a future of its end.

        The thread is one of those that `compiled_by` was given. If the workers are closed because the engine's start
        has failed, the next kernel that `part` would compile raises CancelledError.
        """

        def run() -> None:
            self._own.add(threading.get_ident())
            part()

        return self._threads.submit(run)

    def leaves_out_launches(self) -> bool:
        """Return whether the calling thread's launches are skipped: it is the thread that created the hook."""
        return threading.get_ident() == self._caller

    def __call__(
        self, *, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **about: Any
    ) -> bool | None:
        """Handle a kernel that Triton is about to compile. The arguments are those of Triton's jit_cache_hook.

        - One of the engine's kernels, in the thread that created the hook: lets a worker compile the kernel, and
          returns True, which prevents compilation and launch in this process.
        - One of the engine's kernels, in another thread, unless Triton only warms up: waits until a worker has compiled
          the kernel.

        In all cases but the first, returns the result of the previous hook, or None if there was none. Raises
        CancelledError if the workers are closed and `launched` started this thread's work.
        """
        specialization = compile["specialization_data"]
        asks = self.leaves_out_launches()
        if fn.module.startswith(PACKAGE) and (asks or not is_manual_warmup):
            if asks:
                if (id(fn.jit_function), key) not in self._known:  # its id, since hashing it would parse its source
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
        """Start to load the collected kernels, in the threads that `compiled_by` was given.

        Returns a future for each kernel.
        A kernel that no worker could compile is compiled by the thread that loads it. Kernels whose loading has not
        begun when the workers are closed are not loaded.
        """
        return [self._threads.submit(self._load, *kernel) for kernel in self._compiling]

    def _load(self, jit_function: Any, specialization: str, compiling: Future[bool]) -> Any:
        compiling.result()
        if self._workers.closed:
            return None
        with _PARSING:
            digest_helpers_first(jit_function)
            kernel = jit_function.preload(specialization)
        return kernel and kernel.run  # loads the kernel, and builds its launcher with a C compiler
