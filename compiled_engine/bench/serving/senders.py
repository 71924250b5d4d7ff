"""Runs senders in processes of their own and puts their reports together."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from compiled_engine.bench.serving.sender import Job, Report
from compiled_engine.process.progress import Progress

SENDER = "compiled_engine.bench.serving.sender"
# From the last sender's readiness to the start: its line must have reached all of them.
LEAD_S = 0.05
LAST_LINES = 8


class SenderError(RuntimeError):
    """A sender ended without a report; the message has the last lines of what it said."""


def shared_out(job: Job, processes: int) -> list[Job]:
    """The job in as many parts, requests in turn, and the concurrency in parts that differ by one at most."""
    parts = []
    for number in range(processes):
        concurrency = job.concurrency
        if concurrency is not None:
            concurrency = concurrency // processes + (number < concurrency % processes)
        parts.append(msgspec.structs.replace(job, requests=job.requests[number::processes], concurrency=concurrency))
    return parts


def send(job: Job, processes: int, name: str, progress: Progress) -> list[Report]:
    """A report of each process; all start at the same time. Raises SenderError."""
    with contextlib.ExitStack() as stack, progress.stage(name, total=len(job.requests)) as advance:
        senders = [stack.enter_context(_started(part)) for part in shared_out(job, processes)]
        for sender in senders:
            sender.read_until("ready")
        start = time.monotonic() + LEAD_S
        threads = []
        for sender in senders:
            sender.write(f"{start!r}\n".encode())
            threads.append(threading.Thread(target=sender.follow, args=(advance,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return [sender.report() for sender in senders]


class _Sender:
    def __init__(self, process: subprocess.Popen[bytes], said: Path) -> None:
        self._process = process
        self._said = said
        self._report: bytes | None = None

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `report` says how
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def read_until(self, key: str) -> None:
        """Read up to the line that has this key, or to the end."""
        for line in self._lines():
            if key in line:
                return

    def follow(self, advance: Any) -> None:
        """Read to the end, and hand on how many requests have ended."""
        ended = 0
        for line in self._lines():
            if "ended" in line:
                advance(line["ended"] - ended)
                ended = line["ended"]

    def _lines(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b'{"report"'):
                self._report = line
            else:
                yield json.loads(line)

    def report(self) -> Report:
        code = self._process.wait()
        if self._report is None:
            lines = [line for line in self._said.read_text(errors="replace").splitlines() if line.strip()]
            raise SenderError("\n".join([f"a sender ended with exit code {code}", *lines[-LAST_LINES:]]))
        return msgspec.json.decode(self._report, type=dict[str, Report])["report"]


@contextlib.contextmanager
def _started(job: Job) -> Iterator[_Sender]:
    """A sender that has its job; it does not outlive the block."""
    with tempfile.NamedTemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
        try:
            sender = _Sender(process, Path(said.name))
            sender.write(msgspec.json.encode(job) + b"\n")
            yield sender
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
