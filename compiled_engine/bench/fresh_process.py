"""Runs the worker, or a program, in a fresh process: its result, or an error with the end of what it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from compiled_engine.process.child import as_this_one

WORKER = "compiled_engine.bench.worker"
LIMIT_S = 1200.0
LAST_LINES = 8


class WorkerError(RuntimeError):
    """A worker ended without a result; the message ends with the last lines of its stderr."""


def run_worker(
    options: Mapping[str, Any], workload: Mapping[str, Any] | None, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """The worker's result, and `wall_s`: seconds from starting the process to its first token, seen from here.

    options: of the engine, as JSON. workload: None to start only. Raises WorkerError if the worker fails or takes
    longer than limit_s seconds.
    """
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        timer = threading.Timer(limit_s, worker.kill)
        timer.start()
        try:
            result = _talk(worker, {"options": dict(options), "workload": workload}, start)
            code = worker.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            worker.kill()
            worker.wait()
        if code == 0 and "start_up" in result:
            return result
        raise _error(f"took longer than {limit_s:.0f} s" if late else f"ended with exit code {code}", said)


def seconds_to_print(program: str, *arguments: str) -> float:
    """From starting a process with a Python program to its first line on stdout. It imports as this process does, see
    `keep_bytecode`. Raises WorkerError if it fails."""
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        command = [sys.executable, "-P", "-c", program, *arguments]
        environment = os.environ | as_this_one()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
        if process.returncode or not line:
            raise _error(f"ended with exit code {process.returncode}", said)
        return seconds


def _error(reason: str, said: IO[str]) -> WorkerError:
    said.seek(0)
    lines = [line.rstrip() for line in said.read().splitlines() if line.strip()][-LAST_LINES:]
    return WorkerError("\n".join([reason, *lines]))


def _talk(worker: subprocess.Popen[str], task: dict[str, Any], start: float) -> dict[str, Any]:
    """Send the task, read the lines: all of them together, with the time of the first."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    result: dict[str, Any] = {}
    try:
        with worker.stdin:
            json.dump(task, worker.stdin)
    except BrokenPipeError:  # it ended before it read its task; the exit code says the rest
        return result
    with worker.stdout:
        for line in worker.stdout:
            try:
                record = json.loads(line)
            except ValueError:  # it was killed in the middle of a line
                break
            if "first_token" in record:
                record = {"wall_s": time.perf_counter() - start}
            result |= record
    return result
