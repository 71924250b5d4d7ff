"""The stages of the start-up: when each began and how long it took, from the start of the process on."""

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
    """A stage. `start_s`: seconds since the process began; `parent`: the stage that it is a part of."""

    name: str
    start_s: float
    seconds: float
    parent: str | None = None


def seconds_since_process_start() -> float:
    """Age of this process; on Linux to a hundredth of a second, elsewhere to about one."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.time() - psutil.Process().create_time()
    start = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the line's 22nd field, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


@cache
def _process_origin_s(process: int) -> float:
    """Return when this process began, in seconds of time.perf_counter.

    Read once in a process, so that all timelines are consistent: readings differ by the time for which the process did
    not run between reading its two clocks. A forked child has another `process` and reads its own.
    """
    return time.perf_counter() - seconds_since_process_start()


class Timeline:
    """Collects spans; those without a parent follow one another and add up to the start-up.

    origin_s, spans: of the timeline of another process that this one goes on with; `origin_s` is in seconds of
    time.perf_counter, which the processes of a machine share.
    """

    def __init__(self, origin_s: float | None = None, spans: Iterable[Span] = ()) -> None:
        self.origin_s = _process_origin_s(os.getpid()) if origin_s is None else origin_s
        self._open: list[str] = []
        self.spans = list(spans)

    def now(self) -> float:
        """Seconds since the process began."""
        return time.perf_counter() - self.origin_s

    @contextmanager
    def span(self, name: str, parent: str | None = None) -> Iterator[None]:
        """Time the body as a part of `parent`, or else of whatever span is open."""
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
        """Give a stage that has ended another name, once it is known what it was."""
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
        """The spans in order of their start."""
        return [asdict(span) for span in sorted(self.spans, key=lambda span: span.start_s)]
