"""The program of worker processes: prepare once, fork the workers, and end with them on request, or when no process can
reach them any more.

The workers, and their children, are a process group of their own, which the process that forked them ends and waits
for: the first process of a container would not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Messages = Iterator[dict[str, Any]]
Answer = Callable[[dict[str, Any]], None]
Work = Callable[[Messages, Answer], None]


def run_workers(prepare: Callable[[dict[str, Any]], Work]) -> None:
    """`prepare` gets the order from stdin, imports what the work needs, and returns the work: from messages to answers.

    Arguments: a descriptor for each worker, of a socket with JSON lines both ways. Only what a fork may copy may be
    prepared: no threads, no question to CUDA, nothing of a user's. All end together, in the middle of their work.
    """
    order = sys.stdin.buffer.readline()
    if not order:
        return
    work = prepare(json.loads(order))
    workers: list[int] = []
    # Until here it ends at once on request; from here on it first ends the processes that it has forked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, _exit)
    try:
        _fork(workers, [int(number) for number in sys.argv[1:]], work)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while os.read(0, 1 << 16):
            pass
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if workers:
        _end(workers[0])
    for worker in workers:
        os.waitpid(worker, 0)
    os._exit(0)  # what was imported takes its time to be taken down


def _exit(number: int, frame: object) -> None:
    raise SystemExit


def _fork(workers: list[int], descriptors: list[int], work: Work) -> None:
    """The first of them leads their group: it keeps its number until it is waited for, at the end."""
    while descriptors:
        descriptor = descriptors.pop(0)
        if worker := os.fork():
            workers.append(worker)
            with suppress(OSError):  # it has ended; both wait, since either may be first
                os.setpgid(worker, workers[0])
            os.close(descriptor)
            continue
        try:
            os.setpgid(0, workers[0] if workers else 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            for other in descriptors:
                os.close(other)
            _require_cuda()
            _run(descriptor, work)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)


def _require_cuda() -> None:
    """Raise RuntimeError if PyTorch is imported and CUDA cannot be used: the preparation has used CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA cannot be used in this worker: an import before the fork has used it")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _run(descriptor: int, work: Work) -> None:
    """Answer messages in a worker, to the end of the process."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        rest = b""
        with suppress(OSError):  # the caller has ended without having read everything
            while chunk := os.read(descriptor, 1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    lines.put(line)
        _end(os.getpgrp())

    def answer(value: dict[str, Any]) -> None:
        left = json.dumps(value).encode() + b"\n"
        while left:
            left = left[os.write(descriptor, left) :]

    threading.Thread(target=read, daemon=True).start()
    answer({"ready": True})
    work((json.loads(line) for line in iter(lines.get, None)), answer)
