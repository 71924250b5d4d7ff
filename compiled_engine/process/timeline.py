"""Stages of the start-up: when each began, relative to the start of the process, and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Span:
    """A stage."""

    name: str
    start_s: float  # seconds since the process began
    seconds: float
    parent: str | None = None  # stage that contains it


def seconds_since_process_start() -> float:
    """Return the age of this process in seconds, on Linux with a resolution of a hundredth, elsewhere of about one."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.time() - psutil.Process().create_time()
    start = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the line's 22nd field, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


@cache
def _process_origin_s(process: int) -> float:
    """Return when this process began, in seconds of time.perf_counter.

    Read once per process, so that all timelines agree: readings differ by the time for which the process was not
    running between reading its two clocks. A forked child passes another `process` and reads its own.
    """
    return time.perf_counter() - seconds_since_process_start()


class Timeline:
    """Collects spans; those without a parent follow one another and add up to the start-up.

    origin_s, spans: of another process's timeline that this one continues; `origin_s` is in seconds of
    time.perf_counter, a clock that all processes of a machine share.
    """

    def __init__(self, origin_s: float | None = None, spans: Iterable[Span] = ()) -> None:
        self.origin_s = _process_origin_s(os.getpid()) if origin_s is None else origin_s
        self._open: list[str] = []
        self.spans = list(spans)

    def now(self) -> float:
        """Return seconds since the process began."""
        return time.perf_counter() - self.origin_s

    @contextmanager
    def span(self, name: str, parent: str | None = None) -> Iterator[None]:
        """Time a block as a part of `parent`, or else of the innermost open span."""
        start = self.now()
        parent = parent or (self._open[-1] if self._open else None)
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            self.add(name, start, self.now() - start, parent)

    def add(self, name: str, start_s: float, seconds: float, parent: str | None = None) -> None:
        self.spans.append(Span(name, start_s, seconds, parent))

    def rename(self, name: str, new: str) -> None:
        """Rename a finished stage."""
        self.spans = [
            replace(
                span,
                name=new if span.name == name else span.name,
                parent=new if span.parent == name else span.parent,
            )
            for span in self.spans
        ]

    def seconds(self) -> dict[str, float]:
        """Return the duration of each stage by name, summed over repetitions."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.name] = found.get(span.name, 0.0) + span.seconds
        return found

    def as_records(self) -> list[dict[str, str | float | None]]:
        """Return the spans, ordered by start."""
        return [asdict(span) for span in sorted(self.spans, key=lambda span: span.start_s)]
