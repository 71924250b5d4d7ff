"""Worker processes that answer JSON lines: one process imports what they all need, then forks one for each.

That one is a fresh process, not a fork of this one, so they inherit no threads, no CUDA context and nothing that the
caller's own torch.compile has left behind.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from compiled_engine.process.child import as_this_one

_MOST_LAST_WORDS = 1 << 20


class WorkerEnded(RuntimeError):
    """A worker did not start, or died; the message has its last words."""


class Worker:
    """The caller's end of one worker, which first answers `{"ready": true}`. For one thread at a time."""

    def __init__(self, number: int, connection: socket.socket, last_words: Callable[[], str]):
        self.number = number
        self._connection, self._last_words = connection, last_words
        self._answers = connection.makefile("r", encoding="utf-8")
        self._ready = False

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises WorkerEnded."""
        try:
            self._ready = self._ready or "ready" in self._receive()
            if self._ready:
                with suppress(BrokenPipeError):  # the answer that does not come says it
                    self._connection.sendall(json.dumps(message).encode() + b"\n")
                if answer := self._receive():
                    return answer
            last_words = self._last_words()
        except (OSError, ValueError) as error:  # closed meanwhile
            raise WorkerEnded(f"worker {self.number} was closed") from error
        raise WorkerEnded(f"worker {self.number} {'died' if self._ready else 'did not start'}: {last_words}")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()

    def _receive(self) -> dict[str, Any]:
        """The next answer; empty when the process has ended."""
        try:
            line = self._answers.readline()
        except ConnectionResetError:  # it ended before it read everything
            return {}
        return json.loads(line) if line else {}


class WorkerProcesses:
    """`count` workers, at least one; their program is `main()` of a module, see `worker_program`. They start at once.

    Raises OSError if there can be none.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str] | None = None):
        pairs = [socket.socketpair() for _ in range(count)]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        theirs = [str(their.fileno()) for _, their in pairs]
        self.workers = [Worker(number, own, self._last_words) for number, (own, _) in enumerate(pairs)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {module} import main; main()", *theirs],
                stdin=subprocess.PIPE,
                stdout=self._errors,  # whatever is printed is no answer
                stderr=self._errors,
                pass_fds=[their.fileno() for _, their in pairs],
                # Ctrl-C is the caller's business; it closes the workers.
                start_new_session=True,
                # numpy's library would have threads before the fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {}), **as_this_one()},
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            for _, their in pairs:
                their.close()

    def begin(self, order: dict[str, Any]) -> None:
        """Say what they are to prepare; to be called once, before anything is asked."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answers that do not come say it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End them, and with them what they have started, such as a C++ compiler. May be called again."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # of an order that nobody took
                self._process.stdin.close()
        self._close_files()

    def _close_files(self) -> None:
        for worker in self.workers:
            worker.close()
        self._errors.close()

    def _last_words(self) -> str:
        """Of any of them: they share a place for it."""
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), _MOST_LAST_WORDS, max(0, size - _MOST_LAST_WORDS))
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
