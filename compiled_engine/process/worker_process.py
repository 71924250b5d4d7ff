"""A Python process that answers JSON lines, and the pipes to it.

It is a fresh process, not a fork, so it inherits no threads, no CUDA context and nothing that the caller's own
torch.compile has left behind.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Any

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
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
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
        self._process.kill()
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
    """In the worker: what it is sent, and how it answers. Whatever else is printed is not an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    return map(json.loads, sys.stdin), answer
