"""Compiles pieces in worker processes; without workers, or if a worker cannot, in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_engine.graphs.compiler.compat import forget_compilations
from compiled_engine.graphs.compiler.compile_piece import compile_piece
from compiled_engine.graphs.compiler.record import PieceRecord
from compiled_engine.graphs.compiler.settings import changed_settings
from compiled_engine.process.worker_pool import WorkerPool

log = logging.getLogger("compiled_engine")


class CompileError(RuntimeError):
    """Raised when Inductor fails to compile a piece."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"piece {key} cannot be compiled; mode='eager' runs the model without a compiler\n{what}")


CompilePieces = Callable[[Sequence[str]], Iterator[PieceRecord]]


@contextmanager
def compile_pool(entry: Path, workers: int, modules: Sequence[str] = ()) -> Iterator[CompilePieces]:
    """Start `workers` processes, and yield a function that compiles pieces of `entry` in them.

    The function takes the keys of the pieces, and yields a record of each piece as it is finished, in any order. It
    compiles a piece in this process if there are no workers, or if a worker died or does not know one of the piece's
    ops. It raises CompileError with Inductor's traceback.

    modules: names of the modules that define the passes' ops; workers import them.
    """
    pool = WorkerPool("compiled_engine.graphs.compiler.compile_worker", workers)

    def compile_all(keys: Sequence[str]) -> Iterator[PieceRecord]:
        def by_worker(key: str) -> PieceRecord | str:
            return _understood(pool.ask({"key": key}), key)

        left = list(keys)
        if len(pool):
            left = []
            with ThreadPoolExecutor(len(pool)) as threads:
                try:
                    for future in as_completed([threads.submit(by_worker, key) for key in keys]):
                        result = future.result()
                        if isinstance(result, str):
                            left.append(result)
                        else:
                            yield result
                except BaseException:  # do not wait for the others
                    threads.shutdown(wait=False, cancel_futures=True)
                    pool.close()
                    raise
        if left:
            forget_compilations()
        for key in left:
            try:
                seconds = compile_piece(entry, key)
            except Exception as error:
                raise CompileError(key, str(error)) from error
            yield PieceRecord(key, seconds, None)

    order = {"entry": str(entry.absolute()), "modules": list(modules)}
    try:
        # Only settings that JSON can represent.
        settings = changed_settings("inductor").items()
        simple = {name: value for name, value in settings if isinstance(value, bool | int | float | str | None)}
        pool.begin(order | {"settings": simple})
        yield compile_all
    finally:
        pool.close()


def _understood(answer: dict[str, Any] | None, key: str) -> PieceRecord | str:
    """Return the record of a piece that a worker has compiled, or the piece's key if this process has to compile it.

    answer: the worker's answer, see compile_worker; None if the worker died. Raises CompileError if the compilation
    failed.
    """
    if answer is None:
        log.warning("piece %s is compiled in this process", key)
        return key
    if "seconds" in answer:
        return PieceRecord(key, answer["seconds"], answer["worker"])
    if "error" in answer:
        raise CompileError(key, answer["error"])
    log.warning("piece %s is compiled in this process: %s", key, answer["unknown"])
    return key
