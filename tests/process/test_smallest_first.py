"""Work in two threads: small before large, and small work beside large."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

from compiled_engine.process.smallest_first import SmallestFirst


def test_the_smallest_is_done_first_and_what_is_cancelled_is_not() -> None:
    threads, go_on, begun, done = SmallestFirst(5, "a test"), threading.Event(), threading.Event(), list[int]()

    def noting(size: int) -> Callable[[], int]:
        return lambda: done.append(size) or size

    def hold() -> None:
        begun.set()
        go_on.wait(20)

    first = threads.submit(100, hold)
    assert begun.wait(20)
    assert threads.submit(5, noting(5)).result(20) == 5  # beside the large one
    waiting = {size: threads.submit(size, noting(size)) for size in (9, 6, 8, 7)}
    assert waiting[8].cancel()
    failing = threads.submit(10, lambda: {}[0])
    go_on.set()
    assert isinstance(failing.exception(20), KeyError)
    assert done == [5, 6, 7, 9]
    assert first.result(20) is None
    assert waiting[9].result(20) == 9


def test_what_is_cancelled_leaves_the_others_in_order() -> None:
    draw, threads, go_on, begun = random.Random(0), SmallestFirst(5, "a test"), threading.Event(), threading.Event()
    sizes, done = draw.sample(range(6, 1000), 60), list[int]()

    def hold() -> None:
        begun.set()
        go_on.wait(20)

    threads.submit(5000, hold)
    assert begun.wait(20)
    waiting = {size: threads.submit(size, partial(done.append, size)) for size in sizes}
    cancelled = set(draw.sample(sizes, 30))
    assert all(waiting[size].cancel() for size in cancelled)
    go_on.set()
    for size in set(sizes) - cancelled:
        waiting[size].result(20)
    assert done == sorted(set(sizes) - cancelled)


def test_what_waits_at_the_shutdown_is_cancelled() -> None:
    threads, go_on, begun = SmallestFirst(5, "a test"), threading.Event(), threading.Event()

    def hold() -> str:
        begun.set()
        go_on.wait(20)
        return "done"

    running, waiting = threads.submit(100, hold), threads.submit(100, hold)
    assert begun.wait(20)
    threads.shutdown()
    go_on.set()
    assert running.result(20) == "done"
    assert waiting.cancelled()
