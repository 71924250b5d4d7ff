"""Triton kernels that are asked for are compiled side by side, and not launched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from compiled_engine.kernels.workers import KernelWorkers

PACKAGE = "compiled_engine."
# Triton has one hook for the whole process.
_HOOK = threading.Lock()
# Python 3.11 counts how deep ast.parse is once for all threads, and raises SystemError where two are at it.
PARSES_ALONE = sys.version_info < (3, 12)
_PARSING: AbstractContextManager[Any] = threading.Lock() if PARSES_ALONE else nullcontext()


@contextmanager
def compiled_by(workers: KernelWorkers, threads: Executor) -> Iterator[AskedKernels]:
    """Within this context a launch of one of the engine's kernels launches nothing. If it is not compiled so far,
    `workers` are asked to, and one of `threads` waits for that.

    What such a launch would have written is not there, so a kernel that is compiled already would read it. Launches of
    other threads wait for a worker, and are made; those of others than the engine's kernels are as ever. One engine at
    a time.
    """
    import triton  # not installed everywhere

    with _HOOK:
        workers.aim(triton.runtime.driver.active.get_current_target())
        before = triton.knobs.runtime.jit_cache_hook
        kernels = AskedKernels(workers, threads, before)
        triton.knobs.runtime.jit_cache_hook = kernels
        try:
            yield kernels
        finally:
            triton.knobs.runtime.jit_cache_hook = before


class AskedKernels:
    """The kernels that the thread which makes it has asked for: Triton's hook, in place of `before`."""

    def __init__(self, workers: KernelWorkers, threads: Executor, before: Callable[..., bool | None] | None):
        self._workers, self._threads, self._before = workers, threads, before
        self._caller = threading.get_ident()
        self._own: set[int] = set()  # threads that run what has to be launched
        self._known: set[tuple[int, str]] = set()
        self._compiling: list[tuple[Any, str, Future[bool]]] = []

    def launched(self, part: Callable[[], Any]) -> Future[Any]:
        """Have one of the threads run a part whose launches are made. It ends where the start has failed meanwhile."""

        def run() -> None:
            self._own.add(threading.get_ident())
            part()

        return self._threads.submit(run)

    def leaves_out_launches(self) -> bool:
        """Whether those of the thread that asks are left out."""
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
                fn.jit_function.cache_key  # noqa: B018 - made once, from the parsed source
                if PARSES_ALONE and not is_compiled:
                    fn.jit_function.preload(specialization)
        everything = {"key": key, "fn": fn, "compile": compile, "is_manual_warmup": is_manual_warmup, **about}
        return self._before(**everything) if self._before is not None else None

    def load(self) -> list[Future[Any]]:
        """Have what was asked for loaded, and compiled where no worker did, unless they are closed."""
        return [self._threads.submit(self._load, *kernel) for kernel in self._compiling]

    def _load(self, jit_function: Any, specialization: str, compiling: Future[bool]) -> Any:
        compiling.result()
        if self._workers.closed:
            return None
        with _PARSING:
            kernel = jit_function.preload(specialization)
        return kernel and kernel.run  # which loads it, and builds its launcher with a C compiler
