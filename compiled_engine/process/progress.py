"""Progress of long work (load, compile, capture, generate): shown on stderr, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]
Note = Callable[[], str]


class Progress(Protocol):
    """The receiver of reports from long work. `stage` yields a function that adds to the count of finished units.

    in_bytes: the units are bytes of a download, which has a speed. note: gives a text to show behind the count.
    """

    def stage(
        self, name: str, total: int | None = None, *, in_bytes: bool = False, note: Note | None = None
    ) -> AbstractContextManager[Advance]: ...


class SilentProgress:
    """Shows nothing."""

    @contextmanager
    def stage(
        self, name: str, total: int | None = None, *, in_bytes: bool = False, note: Note | None = None
    ) -> Iterator[Advance]:
        yield lambda count: None


class RichProgress:
    """A bar a stage on stderr; on a terminal it is live, in a log it is one line when the stage ends."""

    @contextmanager
    def stage(
        self, name: str, total: int | None = None, *, in_bytes: bool = False, note: Note | None = None
    ) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichBar

        counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
        if in_bytes:
            counts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(elapsed_when_finished=True))
        if note is not None:
            counts += (TextColumn("{task.fields[note]}"),)
        with RichBar(TextColumn("{task.description}"), BarColumn(), *counts, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total, note="")

            def advance(count: int) -> None:
                bar.update(task, advance=count, note="" if note is None else note())

            yield advance
            if total is None:
                bar.update(task, total=1, completed=1)
