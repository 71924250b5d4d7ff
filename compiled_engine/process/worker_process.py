"""A Python process that answers JSON lines, and the pipes to it.

It is a fresh process, not a fork, so it inherits no threads, no CUDA context and nothing that the caller's own
torch.compile has left behind.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any

from compiled_engine.process.child import import_path

log = logging.getLogger("compiled_engine")


class WorkerEnded(RuntimeError):
    """A worker did not start, or died; the message has its last words."""


class WorkerProcess:
    """Runs `main()` of a module, which first answers `{"ready": true}`."""

    def __init__(self, module: str, number: int, environment: Mapping[str, str] | None = None):
        self.number = number
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Ctrl-C is the caller's business; it closes the workers.
            start_new_session=True,
            env={**os.environ, **(environment or {}), "PYTHONPATH": import_path()},
        )
        self._ready = False

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises WorkerEnded."""
        try:
            self._ready = self._ready or "ready" in self._receive()
            if self._ready:
                self.send(message)
                if answer := self._receive():
                    return answer
            last_words = self._last_words()
        except (OSError, ValueError) as error:  # closed meanwhile
            raise WorkerEnded(f"worker {self.number} was closed") from error
        raise WorkerEnded(f"worker {self.number} {'died' if self._ready else 'did not start'}: {last_words}")

    def send(self, message: dict[str, Any]) -> None:
        """A line that has no answer of its own."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            log.debug("worker %d has ended", self.number)  # the answer that does not come says it

    def close(self) -> None:
        """May be called again."""
        if self._process.returncode is None:  # else its number may be another's
            with suppress(OSError):  # it has ended; else what it has started ends with it, such as a C++ compiler
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):  # of a line that it never took
                    stream.close()

    def _receive(self) -> dict[str, Any]:
        """The next answer; empty when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def messages_and_answer() -> tuple[Iterator[dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """In the worker: what it is sent, and how it answers. Whatever else is printed is not an answer.

    When nobody can send anything any more, it ends at once with all that it has started, in the middle of its work too.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        rest = b""
        while chunk := os.read(0, 1 << 16):  # sys.stdin has a lock, which the interpreter wants when it ends
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put(line)
        os.killpg(0, signal.SIGKILL)  # a session of its own

    threading.Thread(target=read, daemon=True).start()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    return (json.loads(line) for line in iter(lines.get, None)), answer
