"""Worker processes that answer requests from several threads of the caller. Messages are lines of JSON.

One child process imports the modules that all workers need, then forks the workers. The child is itself no fork of the
caller, so the workers inherit no threads, no CUDA context and no state of the caller's torch.compile.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import IO, Any

from compiled_engine.process.child import start_process

log = logging.getLogger("compiled_engine")

_MOST_LAST_WORDS = 1 << 20


class WorkerEnded(RuntimeError):
    """Raised if a worker did not start, has died or was closed. The message has the last line of their output."""


class Worker:
    """The caller's connection to a worker, used by one thread at a time.

    A worker first sends `{"ready": true}`, then an answer to each message.
    """

    def __init__(self, number: int, connection: socket.socket, last_words: Callable[[], str]):
        self.number = number
        self._connection, self._last_words = connection, last_words
        self._answers = connection.makefile("r", encoding="utf-8")
        self._ready = False

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises WorkerEnded if the worker did not start, died or was closed."""
        try:
            self._ready = self._ready or "ready" in self._receive()
            if self._ready:
                with suppress(BrokenPipeError):  # the missing answer reports it
                    self._connection.sendall(json.dumps(message).encode() + b"\n")
                if answer := self._receive():
                    return answer
            last_words = self._last_words()
        except (OSError, ValueError) as error:  # closed in the meantime
            raise WorkerEnded(f"worker {self.number} was closed") from error
        raise WorkerEnded(f"worker {self.number} {'died' if self._ready else 'did not start'}: {last_words}")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()

    def _receive(self) -> dict[str, Any]:
        """Wait for the worker's next line and return it parsed; empty if the worker has ended."""
        try:
            line = self._answers.readline()
        except ConnectionResetError:  # the worker ended before it read everything
            return {}
        return json.loads(line) if line else {}


class WorkerProcesses:
    """Starts `count` workers, at least one, that run `main()` of the module `module`; see `worker_program`.

    environment: variables that are added to the caller's or replace them. Raises OSError if the process that forks the
    workers cannot be started.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str] | None = None):
        pairs = [socket.socketpair() for _ in range(count)]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        theirs = [str(their.fileno()) for _, their in pairs]
        self.workers = [Worker(number, own, self._last_words) for number, (own, _) in enumerate(pairs)]
        try:
            self._process = start_process(
                module,
                theirs,
                [their.fileno() for _, their in pairs],
                has_input=True,
                output=self._errors,  # kept apart from the answers
                environment={"OPENBLAS_NUM_THREADS": "1"} | dict(environment or {}),  # no numpy threads before the fork
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            for _, their in pairs:
                their.close()

    def begin(self, order: dict[str, Any]) -> None:
        """Send the workers the message that `run_workers` passes to `prepare`. Call this once, before any request."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # missing answers report it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the workers and their child processes, such as a C++ compiler. May be called again."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # an order that was never read
                self._process.stdin.close()
        self._close_files()

    def _close_files(self) -> None:
        for worker in self.workers:
            worker.close()
        self._errors.close()

    def _last_words(self) -> str:
        """Return the last line of the workers' stdout and stderr, which all workers write to the same file."""
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), _MOST_LAST_WORDS, max(0, size - _MOST_LAST_WORDS))
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class WorkerPool:
    """A pool of `count` workers that run `main()` of the module `module`, shared by the caller's threads.

    The workers start at once. After `begin` they import modules while the caller does other work. A worker that fails
    to start or ends is not replaced, so the pool may become empty; then `ask` returns None. count may be 0.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str] | None = None):
        self._processes: WorkerProcesses | None = None
        self._lock = Lock()
        self._idle: deque[Worker] = deque()
        self._waiting: deque[Future[Worker | None]] = deque()  # callers, in first-come order
        self._left = 0
        self._closed = False
        try:
            self._processes = WorkerProcesses(module, count, environment) if count else None
        except OSError as error:
            log.warning("no worker process is started: %s", error)

    def __len__(self) -> int:
        """Return the number of workers that were started, including those that have ended since."""
        return len(self._processes.workers) if self._processes else 0

    def begin(self, order: dict[str, Any]) -> None:
        """Send the message that prepares the workers for all requests. Call this once, before `ask`."""
        if self._processes is None:
            return
        self._processes.begin(order)
        with self._lock:
            self._left = len(self._processes.workers)
            self._idle.extend(self._processes.workers)

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Wait for an idle worker, send it a message and return its answer, with the worker's number under "worker".

        Returns None if the worker ends before it answers, if no worker is left, if `begin` was not called, or if the
        pool is closed. Call this in threads that get no KeyboardInterrupt: an interrupted call does not return its
        worker to the pool.
        """
        worker = self._take()
        if worker is None:
            return None
        try:
            answer = worker.ask(message)
        except WorkerEnded as error:
            log.log(logging.DEBUG if self._closed else logging.WARNING, "%s", error)
            self._lose()
            return None
        self._give(worker)
        return answer | {"worker": worker.number}

    def _take(self) -> Worker | None:
        with self._lock:
            if not self._left or self._closed:
                return None
            if self._idle:
                return self._idle.popleft()
            turn: Future[Worker | None] = Future()
            self._waiting.append(turn)
        return turn.result()

    def _give(self, worker: Worker) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set_result(worker)
            else:
                self._idle.append(worker)

    def _lose(self) -> None:
        with self._lock:
            self._left -= 1
            while not self._left and self._waiting:
                self._waiting.popleft().set_result(None)

    def close(self) -> None:
        """End the workers. `ask` returns None for pending and later requests."""
        self._closed = True
        if self._processes is not None:
            self._processes.close()
