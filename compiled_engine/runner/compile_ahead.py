"""Triton kernels that are asked for are compiled side by side, and not launched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from compiled_engine.runner.kernel_workers import KernelWorkers

PACKAGE = "compiled_engine."
# Triton has one hook for the whole process.
_HOOK = threading.Lock()


@contextmanager
def compiled_by(threads: Executor, workers: KernelWorkers) -> Iterator[list[Future[Any]]]:
    """Within this context a launch of one of the engine's kernels, if it is not compiled so far, has it compiled by
    `workers`, and returns.

    What such a launch would have written is not there. Yields the compilations: each waits for a worker in one of
    `threads`, which then loads the kernel, and compiles it if no worker could. Other threads' launches wait for the
    worker, and are made; those of kernels that are compiled already, and of others than the engine's, are as ever. One
    engine at a time.
    """
    import triton  # not installed everywhere

    caller = threading.get_ident()
    asked: set[tuple[Any, str]] = set()
    compilations: list[Future[Any]] = []

    def compile_and_load(fn: Any, specialization: str) -> Any:
        workers.compile(fn.module, fn.name, specialization)
        kernel = fn.jit_function.preload(specialization)
        return kernel and kernel.run  # which loads it, and builds its launcher with a C compiler

    def ask(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **about: Any) -> bool | None:
        """Triton asks it before it compiles; True: do not."""
        if not is_manual_warmup and fn.module.startswith(PACKAGE):
            if threading.get_ident() == caller:
                if (fn.jit_function, key) not in asked:
                    asked.add((fn.jit_function, key))
                    compilations.append(threads.submit(compile_and_load, fn, compile["specialization_data"]))
                return True
            workers.compile(fn.module, fn.name, compile["specialization_data"])
        everything = {"key": key, "fn": fn, "compile": compile, "is_manual_warmup": is_manual_warmup, **about}
        return before(**everything) if before is not None else None

    with _HOOK:
        workers.aim(triton.runtime.driver.active.get_current_target())
        before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = ask
        try:
            yield compilations
        finally:
            triton.knobs.runtime.jit_cache_hook = before
