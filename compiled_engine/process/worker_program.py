"""Main program of worker processes: prepare once, fork the workers, and end with them on request or when the caller is
gone.

The workers and their children form a process group, which the process that forked them ends and waits for; the init
process of a container would not.
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
    """Run workers for `prepare`, which gets the order from stdin, imports what the work needs, and returns the work: a
    function from messages to answers.

    Program arguments: for each worker the descriptor of a socket with JSON lines both ways. The preparation must be
    safe to fork: no threads, no calls of CUDA, no user code. All workers end together, even in the middle of their
    work.
    """
    order = sys.stdin.buffer.readline()
    if not order:
        return
    work = prepare(json.loads(order))
    workers: list[int] = []
    # From here on SIGTERM first ends the forked processes.
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
    os._exit(0)  # without the slow teardown of imported modules


def _exit(number: int, frame: object) -> None:
    raise SystemExit


def _fork(workers: list[int], descriptors: list[int], work: Work) -> None:
    """Fork the workers. The first leads their process group: its id stays valid until it is waited for, at the end."""
    while descriptors:
        descriptor = descriptors.pop(0)
        if worker := os.fork():
            workers.append(worker)
            with suppress(
                OSError
            ):  # it may have ended. Parent and child both set the group, since either may be first.
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
    """Raise RuntimeError if PyTorch is imported and CUDA cannot be used, because the preparation has used CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA cannot be used in this worker: an import before the fork has used it")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _run(descriptor: int, work: Work) -> None:
    """Answer messages in a worker, until the process ends."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        rest = b""
        with suppress(OSError):  # the caller ended before it read everything
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
