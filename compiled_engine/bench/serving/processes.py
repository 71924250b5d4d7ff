"""Engines and servers in fresh processes, and how long each takes until it is ready."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import psutil

OFFLINE = "compiled_engine.bench.serving.offline"
COMMAND = "from compiled_engine.cli.app import main; main()"
LIMIT_S = 600.0
POLL_S = 0.01
END_S = 60.0
LAST_LINES = 8


class ProcessError(RuntimeError):
    """An engine or a server has ended early, or was not ready in time; the message ends with its last lines."""


class Ready(NamedTuple):
    """url: of a server. ready_s: seconds from starting the process until requests could be taken."""

    url: str
    ready_s: float
    pid: int

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far, in seconds, of the process and of each below it, by name and id."""
        own = psutil.Process(self.pid)
        found = {}
        for process in (own, *own.children(recursive=True)):
            times = process.cpu_times()
            found[f"{'server' if process.pid == self.pid else 'child'} {process.pid}"] = times.user + times.system
        return found


def offline(options: Mapping[str, Any], workload: Mapping[str, Any] | None, repeats: int) -> dict[str, Any]:
    """ready_s, and what the engine measured; see `offline.run`. Raises ProcessError."""
    task = json.dumps({"options": dict(options), "workload": workload, "repeats": repeats})
    with tempfile.NamedTemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", OFFLINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(task)
            found: dict[str, Any] = {}
            for line in process.stdout:
                record = json.loads(line)
                if "ready" in record:
                    found["ready_s"] = time.perf_counter() - start
                else:
                    found |= record["result"]
            if process.wait(END_S) != 0 or "ready_s" not in found:
                raise ProcessError(_last_words("the engine", process.returncode, Path(said.name)))
            return found
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[Ready]:
    """`compiled-engine serve` with these arguments, at a free port. Raises ProcessError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile() as said:
        start = time.perf_counter()
        whole = ["serve", "--port", str(port), "--quiet", "--uvicorn-log-level", "warning", *arguments]
        process = subprocess.Popen([sys.executable, "-P", "-c", COMMAND, *whole], stdout=said, stderr=said)
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.perf_counter() - start > LIMIT_S:
                    raise ProcessError(_last_words("the server", process.poll(), Path(said.name)))
                time.sleep(POLL_S)
            yield Ready(f"http://127.0.0.1:{port}", time.perf_counter() - start, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _last_words(name: str, code: int | None, said: Path) -> str:
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    reason = f"was not ready after {LIMIT_S:.0f} s" if code is None else f"ended with exit code {code}"
    return "\n".join([f"{name} {reason}", *lines[-LAST_LINES:]])
