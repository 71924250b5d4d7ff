"""Shows the progress of long work (load, compile, capture, generate) on stderr, or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar

Advance = Callable[[int], None]
Note = Callable[[], str]


class Progress(Protocol):
    """Interface of progress displays. Long work runs in a block, `with progress.stage(name) as advance`.

    The work calls advance(n) when n more units of it are finished. total: the number of units; None: unknown. in_bytes:
    the units are bytes of a download, shown with its speed. note: returns a text to show after the count. patience_s:
    the stage is shown only once it has taken this long; 0: at once.
    """

    @contextmanager
    def stage(
        self,
        name: str,
        total: int | None = None,
        *,
        in_bytes: bool = False,
        note: Note | None = None,
        patience_s: float = 0.0,
    ) -> Iterator[Advance]:
        yield lambda count: None


class SilentProgress(Progress):
    """A progress display that shows nothing."""


class RichProgress:
    """Shows a progress bar for each stage on stderr: live on a terminal, otherwise one line when the stage ends."""

    @contextmanager
    def stage(
        self,
        name: str,
        total: int | None = None,
        *,
        in_bytes: bool = False,
        note: Note | None = None,
        patience_s: float = 0.0,
    ) -> Iterator[Advance]:
        begun, done = time.perf_counter(), 0
        update: Callable[..., None] | None = None
        with ExitStack() as shown:

            def advance(count: int) -> None:
                nonlocal done, update
                done += count
                if update is None and time.perf_counter() - begun >= patience_s:
                    bar = shown.enter_context(_bar(in_bytes=in_bytes, noted=note is not None))
                    update = partial(bar.update, bar.add_task(name, total=total, note=""))
                if update is not None:
                    update(completed=done, note="" if note is None else note())

            if not patience_s:
                advance(0)
            yield advance
            if total is None and update is not None:
                update(total=1, completed=1)


class WithTimeLeft:
    """A progress display that adds an estimate of the time left to the stages of another display.

    The estimate assumes that the units of the current stage which are left take as long as the finished ones. clock:
    returns the time in seconds.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic):
        self._progress, self._clock = progress, clock

    @contextmanager
    def stage(
        self,
        name: str,
        total: int | None = None,
        *,
        in_bytes: bool = False,
        note: Note | None = None,
        patience_s: float = 0.0,
    ) -> Iterator[Advance]:
        begun, done = self._clock(), 0

        def noted() -> str:
            texts = [note()] if note is not None else []
            if total is not None and 0 < done < total:
                minutes, seconds = divmod(round((self._clock() - begun) * (total - done) / done), 60)
                texts.append(f"about {minutes}:{seconds:02} left")
            return ", ".join(texts)

        with self._progress.stage(name, total, in_bytes=in_bytes, note=noted, patience_s=patience_s) as advance:

            def counted(count: int) -> None:
                nonlocal done
                done += count
                advance(count)

            yield counted


class _Stderr:
    """A file that writes to the current sys.stderr. It ignores errors, since a full disk must not end the work."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def _bar(*, in_bytes: bool, noted: bool) -> RichBar:
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
    if noted:
        counts += (TextColumn("{task.fields[note]}"),)
    console = Console(file=cast(IO[str], _Stderr()))
    return RichBar(TextColumn("{task.description}"), BarColumn(), *counts, console=console)
