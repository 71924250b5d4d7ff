"""Processes that benchmarks start: workers with an engine, servers, request senders, and other programs.

Each process is a fresh one, so that its imports are measured too. It ends with the block that started it. Errors have
the last lines of its stderr.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import IO, Any, NamedTuple

import psutil

from compiled_engine.process.child import as_this_one

WORKER = "compiled_engine.bench.worker"
COMMAND = "from compiled_engine.cli.app import main; main()"
WORKER_LIMIT_S = 1200.0
SERVER_LIMIT_S = 600.0
POLL_S = 0.01
# How long a server may take to exit.
END_S = 60.0
LAST_LINES = 8
# Below the ephemeral ports of Linux.
SERVER_PORTS = range(20_000, 32_000)


class ProcessError(RuntimeError):
    """A process exited early, failed, or took too long. The message ends with its last lines on stderr."""


class Started:
    """A process with pipes to its stdin and stdout. `name` is its name in errors."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, stderr: IO[bytes], start: float) -> None:
        self.process = process
        self._name = name
        self._stderr = stderr
        self._start = start

    def seconds(self) -> float:
        """Return the seconds since the start of the process."""
        return time.perf_counter() - self._start

    def write(self, line: bytes) -> None:
        """Write a line to the stdin of the process. Does nothing if the process has exited; see its exit code."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the stdout of the process until its end."""
        assert self.process.stdout is not None
        return iter(self.process.stdout)

    def error(self, reason: str | None = None) -> ProcessError:
        """Return an error with the reason, by default the exit code, and the last lines of stderr."""
        self._stderr.seek(0)
        lines = [line.rstrip() for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        what = reason or f"ended with exit code {self.process.wait()}"
        return ProcessError("\n".join([f"{self._name} {what}".strip(), *lines[-LAST_LINES:]]))


@contextmanager
def started(
    arguments: Sequence[str], name: str = "", *, has_pipes: bool = True, environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """Start a Python process with these arguments, yield it, and kill it at the end of the block.

    name: of the process in errors. has_pipes: connect stdin and stdout to this process; otherwise there is no input,
    and stdout goes to stderr. environment: of the process; None: as in this process.
    """
    with tempfile.TemporaryFile() as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_pipes else stderr,
            stderr=stderr,
            env=environment,
        )
        try:
            yield Started(process, name, stderr, start)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


def run_worker(
    options: Mapping[str, Any],
    workload: Mapping[str, Any] | None,
    limit_s: float = WORKER_LIMIT_S,
    name: str = "",
) -> dict[str, Any]:
    """Run a worker, see bench/worker.py, and return its result with ready_s and wall_s.

    ready_s and wall_s are measured from outside: the seconds from process start until the engine could take requests,
    and until the first token. options: engine options as JSON. workload: see `worker_workloads`; None: only start the
    engine. name: of the worker in errors. Raises ProcessError if the worker fails or takes longer than `limit_s`
    seconds.
    """
    with started(["-m", WORKER], name) as worker:
        timer = threading.Timer(limit_s, worker.process.kill)
        timer.start()
        try:
            worker.write(json.dumps({"options": dict(options), "workload": workload}).encode())
            result: dict[str, Any] = {}
            for line in worker.lines():
                try:
                    record = json.loads(line)
                except ValueError:  # it was killed in the middle of a line
                    break
                for event, figure in (("ready", "ready_s"), ("first_token", "wall_s")):
                    if event in record:
                        record = {figure: worker.seconds()}
                result |= record
            code = worker.process.wait()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
        if code == 0 and "start_up" in result:
            return result
        raise worker.error(f"took longer than {limit_s:.0f} s" if is_late else None)


def seconds_to_print(program: str, *arguments: str) -> float:
    """Return the seconds from the start of a Python program's process to its first line on stdout.

    The program's imports use bytecode as this process does, see `keep_bytecode`. Raises ProcessError if the program
    fails or prints nothing.
    """
    with started(["-c", program, *arguments], environment=os.environ | as_this_one()) as process:
        line = next(process.lines(), b"")
        seconds = process.seconds()
        if process.process.wait() or not line:
            raise process.error()
        return seconds


class Ready(NamedTuple):
    """A server that is ready for requests."""

    url: str
    ready_s: float  # seconds from process start until it could take requests
    pid: int

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time so far, in seconds, of the process and its descendants, by name and id."""
        own = psutil.Process(self.pid)
        found = {}
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it exited after it was listed
                times = process.cpu_times()
                found[f"{'server' if process.pid == self.pid else 'child'} {process.pid}"] = times.user + times.system
        return found


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[Ready]:
    """Run `compiled-engine serve` with these arguments at a free port during the block; yield it once it is ready.

    Raises ProcessError if the server fails or is not ready in time.
    """
    port = _free_port()
    whole = ["serve", "--port", str(port), "--quiet", "--uvicorn-log-level", "warning", *arguments]
    with started(["-c", COMMAND, *whole], "the server", has_pipes=False) as found:
        try:
            while not _is_ready(port):
                if found.process.poll() is not None:
                    raise found.error()
                if found.seconds() > SERVER_LIMIT_S:
                    raise found.error(f"was not ready after {SERVER_LIMIT_S:.0f} s")
                time.sleep(POLL_S)
            yield Ready(f"http://127.0.0.1:{port}", found.seconds(), found.process.pid)
        finally:
            found.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                found.process.wait(END_S)


def _free_port() -> int:
    """Return a free port of SERVER_PORTS.

    An ephemeral port would not do: the system might give it to a client before the server listens.
    """
    for port in random.sample(SERVER_PORTS, len(SERVER_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProcessError(f"no port from {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} is free for a server")


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=SERVER_LIMIT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
