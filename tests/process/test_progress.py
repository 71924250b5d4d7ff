"""Progress on stderr: which stages are shown, and with what count."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compiled_engine.process.progress import Advance, Note, RichProgress, WithTimeLeft


@pytest.mark.parametrize(("patience_s", "shown"), [(0.0, True), (1e-9, True), (3600.0, False)])
def test_a_stage_that_ends_early_is_not_shown(patience_s: float, shown: bool, capsys: pytest.CaptureFixture) -> None:
    with RichProgress().stage("pool", total=5, note=lambda: "two by two", patience_s=patience_s) as advance:
        advance(2)
        advance(2)
    text = capsys.readouterr().err
    assert [part in text for part in ("pool", "4/5", "two by two")] == [shown] * 3


def test_a_stage_without_a_count_is_complete_at_its_end(capsys: pytest.CaptureFixture) -> None:
    with RichProgress().stage("load"):
        pass
    assert "1/1" in capsys.readouterr().err
    with RichProgress().stage("load", patience_s=3600.0):
        pass
    assert capsys.readouterr().err == ""


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error may be a log there."""
    monkeypatch.setattr(sys, "stderr", FullDisk())
    done = 0
    with RichProgress().stage("load", total=2) as advance:
        advance(2)
        done = 2
    assert done == 2


class Notes:
    """A display that keeps the note of each call."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, note: Note | None = None, **more: Any) -> Iterator[Advance]:
        assert note is not None
        yield lambda count: self.texts.append(note())


def test_the_time_left_is_that_of_the_units_left() -> None:
    notes, seconds = Notes(), iter([10.0, 12.0, 40.0, 50.0, 60.0])
    progress = WithTimeLeft(notes, lambda: next(seconds))
    with progress.stage("tune", total=100) as advance:
        advance(0)  # nothing is known yet
        advance(2)
        advance(28)
        advance(70)
    with progress.stage("tune", note=lambda: "two by two") as advance:
        advance(7)
    assert notes.texts == ["", "about 1:38 left", "about 1:10 left", "", "two by two"]
