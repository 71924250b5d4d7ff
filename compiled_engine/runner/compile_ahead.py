"""Triton kernels that are asked for are compiled by threads, and not launched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled_by(threads: Executor) -> Iterator[list[Future[Any]]]:
    """Within this context a launch of a kernel not compiled so far has it compiled by one of `threads`, and returns.

    What such a launch would have written is not there. Yields the compilations. Launches of other threads, and those of
    kernels that are compiled already, are as ever.
    """
    import triton  # not installed everywhere

    caller, before = threading.get_ident(), triton.knobs.runtime.jit_cache_hook
    asked: set[tuple[Any, str]] = set()
    compilations: list[Future[Any]] = []

    def ask(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **about: Any) -> bool | None:
        """Triton asks it before it compiles; True: do not."""
        if is_manual_warmup or threading.get_ident() != caller:
            everything = {"key": key, "fn": fn, "compile": compile, "is_manual_warmup": is_manual_warmup, **about}
            return before(**everything) if before is not None else None
        if (fn.jit_function, key) not in asked:
            asked.add((fn.jit_function, key))
            compilations.append(threads.submit(fn.jit_function.preload, compile["specialization_data"]))
        return True

    triton.knobs.runtime.jit_cache_hook = ask
    try:
        yield compilations
    finally:
        triton.knobs.runtime.jit_cache_hook = before
