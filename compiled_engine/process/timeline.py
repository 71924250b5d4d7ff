"""Records the stages of the engine's start-up: when each began, from the start of the process, and its seconds."""

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
    """A finished stage of the start-up."""

    name: str
    start_s: float  # seconds since the process began
    seconds: float
    parent: str | None = None  # stage that contains it


def seconds_since_process_start() -> float:
    """Return the age of this process in seconds. The resolution is 0.01 s on Linux, elsewhere about 1 s."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.time() - psutil.Process().create_time()
    start = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the line's 22nd field, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


@cache
def _process_origin_s(process: int) -> float:
    """Return the time at which the current process began, in seconds of time.perf_counter. process: its process id.

    The result is cached by process id, so all timelines of a process agree: two computations could differ, as the
    process may be suspended between reading two clocks. A forked child has another id and computes its own time.
    """
    return time.perf_counter() - seconds_since_process_start()


class Timeline:
    """Collects the spans of a start-up. Spans without a parent follow one another and add up to the whole start-up.

    origin_s: the time of time.perf_counter at which the spans' start_s is 0; None: the start of this process. spans:
    spans to begin with. Both may come from another process's timeline, which this one continues: all processes of a
    machine share this clock.
    """

    def __init__(self, origin_s: float | None = None, spans: Iterable[Span] = ()) -> None:
        self.origin_s = _process_origin_s(os.getpid()) if origin_s is None else origin_s
        self._open: list[str] = []
        self.spans = list(spans)

    def now(self) -> float:
        """Return the seconds since `origin_s`, by default the start of the process."""
        return time.perf_counter() - self.origin_s

    @contextmanager
    def span(self, name: str, parent: str | None = None) -> Iterator[None]:
        """Time a block and add its span.

        parent: name of the containing span; None: the innermost block that is being timed.
        """
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
        """Rename the spans called `name` to `new`, also where they are parents of other spans."""
        self.spans = [
            replace(
                span,
                name=new if span.name == name else span.name,
                parent=new if span.parent == name else span.parent,
            )
            for span in self.spans
        ]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage by name, summed over spans of the same name."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.name] = found.get(span.name, 0.0) + span.seconds
        return found

    def as_records(self) -> list[dict[str, str | float | None]]:
        """Return each span as a dict of its fields, ordered by start."""
        return [asdict(span) for span in sorted(self.spans, key=lambda span: span.start_s)]
