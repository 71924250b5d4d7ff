"""What an engine may leave behind when it ends or fails: processes, folders, descriptors."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

SOON_S = 10.0


def running(program: str, of: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the processes below a process that run this module of the engine."""
    found = []
    for process in (of or psutil.Process()).children(recursive=True):
        # It may have ended since it was listed, or wait for its parent to read its status.
        with suppress(psutil.NoSuchProcess):
            if any(program in part for part in process.cmdline()):
                found.append(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, also if its parent has not read its status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def workers(of: psutil.Process | None = None) -> list[psutil.Process]:
    return running("worker_main", of)


def of_this_test(temporary: Path) -> list[int]:
    """Return the ids of processes started by the test, whose temporary files are in its folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(temporary):
                found.append(process.pid)
    return found


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for temporary files, then assert that no process, folder or descriptor is left."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    for device in range(torch.cuda.device_count()):
        torch.cuda.mem_get_info(device)  # its context has descriptors of its own
    gc.collect()
    before = psutil.Process().num_fds()
    yield temporary
    wait_until(lambda: not of_this_test(temporary), SOON_S)
    wait_until(lambda: not list(temporary.glob("compiled*")), SOON_S)
    assert psutil.Process().num_fds() <= before + 4
