"""`MediaProcessing` processes images, or audio, in worker processes, each image once, and caches the results."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.frontend.cache import ImageCache, ProcessedMedia
from compiled_engine.features.images.frontend.sources import MediaSource
from compiled_engine.process.cores import usable_cores
from compiled_engine.process.forks import unless_forked
from compiled_engine.process.smallest_first import Stopped, WorkStopped
from compiled_engine.process.worker_pool import WorkerPool

log = logging.getLogger("compiled_engine")

WORKER = "compiled_engine.features.images.frontend.worker"
NO_EXCHANGE = "{} cannot be exchanged with the processes that do the work"
POLL_S = 0.05
MOST_THREADS = 8  # of a process: an image of a million pixels keeps no more busy
CLOSED = "the engine is closed, and processes no {}"


class Processor(Protocol):
    """A checkpoint's processor of a medium, and how it is used."""

    @property
    def worker(self) -> str:
        """The module whose `main` runs the worker processes; see worker.py of this folder for their messages."""

    @property
    def one(self) -> str:
        """The medium's name, such as "image", in metrics and errors."""

    @property
    def many(self) -> str:
        """The plural of `one`."""

    @property
    def dtype(self) -> str:
        """The dtype of floating-point results, torch's name."""

    def order(self) -> dict[str, Any]:
        """Return the first message to each worker process: the folders and limits of its work."""


class ProcessorFiles(NamedTuple):
    """The checkpoint's processor of images, and how it is used."""

    folder: Path
    tokenizer: Path
    dtype: str  # of floating-point results, torch's name
    max_pixels: int  # of an image

    @property
    def worker(self) -> str:
        return WORKER

    @property
    def one(self) -> str:
        return "image"

    @property
    def many(self) -> str:
        return "images"

    def order(self) -> dict[str, Any]:
        """Return the message that starts the worker processes, see `main` in worker.py."""
        return {
            "folder": str(self.folder),
            "tokenizer": str(self.tokenizer),
            "dtype": self.dtype,
            "max_pixels": self.max_pixels,
        }


class MediaProcessing:
    """Processes images, or another medium, with the checkpoint's processor. Thread-safe.

    num_workers: number of processes, which start with the first image or with `start`. cache_bytes: see ImageCache.
    `unusable` is the error of a processor that cannot be used, once a process has reported it.
    """

    def __init__(self, files: Processor, num_workers: int, cache_bytes: int) -> None:
        self._files, self._num_workers = files, num_workers
        self._identity = json.dumps(files.order())
        self.cache = ImageCache(cache_bytes)
        self._running: dict[str, Future[ProcessedMedia]] = {}
        self._wanted: Counter[Future[ProcessedMedia] | None] = Counter()  # callers that wait for each of these
        self._lock = threading.Lock()  # protects the fields above and below
        self._pool: WorkerPool | None = None
        self._is_closed = False
        self._numbers = count()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=files.many)
        self._asking: Counter[WorkerPool] = Counter()  # images that each pool processes
        self._folder: Path | None = None  # through which the processes exchange data
        self.num_queries, self.num_hits, self.seconds = 0, 0, 0.0
        self.unusable = ""

    @property
    def dtype(self) -> str:
        """The dtype of the tower's input, torch's name."""
        return self._files.dtype

    def start(self) -> None:
        """Start the processes, and warn if they cannot load the processor. Does not wait for them."""
        self._threads.submit(self._try)

    def _try(self) -> None:
        with suppress(OSError, RuntimeError):  # errors that the first image will report; closed
            pool, _ = self._begin()
            answer = pool.ask({})
            self._end(pool, has_ended=answer is None)
            self._note(answer)

    def _note(self, answer: Mapping[str, Any] | None) -> None:
        """Store and log the error if a worker has answered that the processor cannot be used.

        answer: None if the worker has ended without an answer.
        """
        if answer is not None and answer.get("unusable") and not self.unusable:
            self.unusable = answer["error"]
            log.warning("prompts may have no %s: %s", self._files.many, self.unusable)

    def submit(self, source: MediaSource, settings: Mapping[str, Any]) -> Future[ProcessedMedia]:
        """Begin to process an image, and return a future of the result.

        Nothing is begun if the cache has the image, or if it is being processed already. settings: arguments of the
        processor. The result raises ValueError for an image that cannot be processed, and RuntimeError after `close`,
        or if no processes can be used.
        """
        stated = json.dumps(settings, sort_keys=True, default=str)
        key = source.digest(self._identity + stated)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(CLOSED.format(self._files.many))
            self.num_queries += 1
            running = self._running.get(key)
            if running is None and (found := self.cache.get(key)) is not None:
                running = Future()
                running.set_result(found)
            if running is not None:
                self.num_hits += 1
                if not running.done():
                    self._wanted[running] += 1
                return running
            running = self._running[key] = Future()
            self._wanted[running] = 1
            self._threads.submit(self._run, running, key, source, dict(settings))
            return running

    def result(self, running: Future[ProcessedMedia], is_stopped: Stopped) -> ProcessedMedia:
        """Wait for an image that `submit` has begun, and return it. Raises the error of its processing.

        If `is_stopped` returns True before, calls `leave` and raises WorkStopped.
        """
        while not wait([running], POLL_S).done:
            if is_stopped():
                self.leave(running)
                raise WorkStopped(f"nobody waits for the {self._files.one}")
        return running.result()

    def leave(self, running: Future[ProcessedMedia]) -> None:
        """Record that a caller of `submit` no longer waits for an image.

        If no caller waits and the processing has not begun, it is cancelled.
        """
        with self._lock:
            if running in self._wanted:
                self._wanted[running] -= 1

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, and the cache's size."""
        return {
            "mm_cache_queries": self.num_queries,
            "mm_cache_hits": self.num_hits,
            f"{self._files.one}_processor_seconds": self.seconds,
            "mm_cache_bytes": self.cache.num_bytes,
        }

    def close(self) -> None:
        """End the processes. Images that are being processed raise RuntimeError. May be called again."""
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
            left, self._running = list(self._running.values()), {}
            self._wanted.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for running in left:
            running.set_exception(RuntimeError(CLOSED.format(self._files.many)))
        if pool is not None:
            pool.close()

    def _run(self, running: Future[ProcessedMedia], key: str, source: MediaSource, settings: dict[str, Any]) -> None:
        with self._lock:
            if self._running.get(key) is running and not self._wanted[running]:
                del self._running[key], self._wanted[running]
                running.cancel()
                return
        start_s = time.perf_counter()
        try:
            image = self._process(key, source, settings)
        except BaseException as error:
            if self._takes(key):
                running.set_exception(error)
            return
        self.cache.put(image)
        if self._takes(key):
            self.seconds += time.perf_counter() - start_s
            running.set_result(image)

    def _takes(self, key: str) -> bool:
        """Remove an image from the running ones. Return whether the caller must set the result of its future.

        If not, `close` has set the result.
        """
        with self._lock:
            running = self._running.pop(key, None)
            self._wanted.pop(running, None)
            return running is not None

    def _process(self, key: str, source: MediaSource, settings: dict[str, Any]) -> ProcessedMedia:
        try:
            return self._exchange(key, source, settings)
        except OSError as error:  # not the image's fault; the error omits the path
            reason = error.strerror or type(error).__name__
            raise RuntimeError(f"{NO_EXCHANGE.format(self._files.many)}: {reason}") from error

    def _exchange(self, key: str, source: MediaSource, settings: dict[str, Any]) -> ProcessedMedia:
        """Have a process process an image, and return the result. Data is exchanged through files.

        Raises OSError if the files cannot be used, ValueError if the image cannot be processed, and RuntimeError for
        any other error of the processes.
        """
        pool, folder = self._begin()
        number = next(self._numbers)
        given, made = folder / f"{number}.source", folder / f"{number}.tensors"
        answer: dict[str, Any] | None = {}
        try:
            given.write_bytes(source.data)
            answer = pool.ask(
                {
                    "input": str(given),
                    "output": str(made),
                    "kind": source.kind,
                    "mode": source.mode,
                    "shape": source.shape,
                    "settings": settings,
                }
            )
            if answer is None and not len(pool):
                raise RuntimeError(f"no process can be started that processes {self._files.many}")
            if answer is None:
                raise ValueError(f"the {self._files.one} could not be processed: its process ended, for time or memory")
            self._note(answer)
            if "error" in answer:
                raise (RuntimeError if answer.get("internal") else ValueError)(answer["error"])
            with made.open("rb") as file:
                inputs = {
                    name: PlainTensor(dtype, tuple(shape), file.read(size))
                    for name, dtype, shape, size in answer["tensors"]
                }
        finally:
            self._end(pool, has_ended=answer is None)
            given.unlink(missing_ok=True)
            made.unlink(missing_ok=True)
        return ProcessedMedia(key, answer["placeholder"], tuple(answer["token_ids"]), inputs)

    def _begin(self) -> tuple[WorkerPool, Path]:
        """Return the processes, and the folder through which they exchange data. Starts processes if there are none.

        Counts an image as being processed by them; `_end` must follow. Raises RuntimeError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError(CLOSED.format(self._files.many))
            if self._folder is None or not self._folder.is_dir():  # temporary folders may be cleared
                self._folder = Path(tempfile.mkdtemp(prefix=f"{self._files.many}-"))
                weakref.finalize(self, unless_forked(shutil.rmtree), self._folder, True)
            if self._pool is None:
                self._pool = WorkerPool(self._files.worker, self._num_workers)
                self._pool.begin(self._files.order() | {"threads": threads_of_each(self._num_workers)})
                weakref.finalize(self, unless_forked(self._pool.close))
            self._asking[self._pool] += 1
            return self._pool, self._folder

    def _end(self, pool: WorkerPool, *, has_ended: bool) -> None:
        """Record that the pool no longer processes an image that `_begin` has counted.

        has_ended: a process of the pool has ended. Then the pool's other processes finish their images, and the next
        image starts a new pool.
        """
        with self._lock:
            if has_ended and self._pool is pool:
                self._pool = None
                log.warning("processes that process %s are replaced, since one of them ended", self._files.many)
            self._asking[pool] -= 1
            if self._asking[pool]:
                return
            del self._asking[pool]
            if self._pool is pool:
                return
        pool.close()


def threads_of_each(num_workers: int) -> int:
    """Return the number of threads of each of `num_workers` processes that share the machine's cores."""
    return max(1, min(MOST_THREADS, usable_cores() // num_workers))


def missing_packages() -> tuple[str, ...]:
    """Return the packages that images need and that are not installed."""
    return tuple(name for package, name in (("PIL", "pillow"),) if find_spec(package) is None)
