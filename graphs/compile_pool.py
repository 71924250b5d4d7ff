"""Compiles unique pieces in parallel processes, or in this one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from compiled_engine.graphs.compat import changed_inductor_settings, forget_compilations
from compiled_engine.graphs.compile_piece import compile_piece

log = logging.getLogger("compiled_engine")

_START_WORKER = "from compiled_engine.graphs.compile_worker import main; main()"


class CompileError(RuntimeError):
    """Inductor failed on a piece."""


@dataclass(frozen=True)
class CompiledPiece:
    """How a piece was compiled: seconds since the pool began, seconds taken, and by which worker (None: here)."""

    key: str
    start_s: float
    seconds: float
    worker: int | None


CompilePieces = Callable[[Sequence[str]], Iterator[CompiledPiece]]


@contextmanager
def compile_pool(entry: Path, workers: int, modules: Sequence[str] = ()) -> Iterator[CompilePieces]:
    """A function that compiles pieces of an entry by key, in any order, as they get ready.

    The workers start at once, so that they import their compiler while the caller still traces. `modules` define the
    ops of passes that are not ours. A piece that a worker cannot compile because it does not know an op, or because
    it died, is compiled in this process. Raises CompileError with Inductor's traceback.
    """
    started = [_Worker(entry, number, modules) for number in range(workers)]
    origin = time.perf_counter()

    def compile_all(keys: Sequence[str]) -> Iterator[CompiledPiece]:
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in started:
            idle.put(worker)

        def by_worker(key: str) -> CompiledPiece | str:
            worker = idle.get()
            try:
                start = time.perf_counter() - origin
                return _understood(worker.compile(key), key, start, worker.number)
            finally:
                idle.put(worker)

        left = list(keys)
        if started:
            left = []
            with ThreadPoolExecutor(len(started)) as threads:
                for future in as_completed([threads.submit(by_worker, key) for key in keys]):
                    result = future.result()
                    if isinstance(result, str):
                        left.append(result)
                    else:
                        yield result
        if left:
            forget_compilations()
        for key in left:
            start = time.perf_counter() - origin
            yield CompiledPiece(key, start, compile_piece(entry, key), None)

    try:
        yield compile_all
    finally:
        for worker in started:
            worker.close()


def _understood(answer: dict[str, Any], key: str, start_s: float, worker: int) -> CompiledPiece | str:
    """The result, or the key when this process has to compile the piece."""
    if "seconds" in answer:
        return CompiledPiece(key, start_s, answer["seconds"], worker)
    if "error" in answer:
        raise CompileError(f"piece {key} cannot be compiled:\n{answer['error']}")
    log.warning("piece %s is compiled in this process: %s", key, answer["unknown"])
    return key


class _Worker:
    """A compile_worker process and the pipes to it."""

    def __init__(self, entry: Path, number: int, modules: Sequence[str]):
        self.number = number
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START_WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Ctrl-C is the caller's business; it closes the workers.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._ready = False
        settings = changed_inductor_settings()
        self._send({"entry": str(entry.absolute()), "modules": list(modules), "settings": settings})

    def compile(self, key: str) -> dict[str, Any]:
        if not self._ready:
            self._ready = "ready" in self._receive()
        if not self._ready:
            return {"unknown": f"worker {self.number} did not start: {self._last_words()}"}
        self._send({"key": key})
        return self._receive() or {"unknown": f"worker {self.number} died: {self._last_words()}"}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            log.debug("worker %d has ended", self.number)  # the answer that does not come says it

    def _receive(self) -> dict[str, Any]:
        """The next answer; empty when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
