"""Main program of the process that forks workers, see worker_pool: prepare once, fork the workers, wait for the end.

The process ends together with its workers when it is asked to (SIGTERM) or when its caller is gone. The workers and
their child processes form a process group. This process kills the group and reaps the workers, since the init process
of a container may reap nothing.
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


def run_workers(prepare: Callable[[dict[str, Any]], Work], *, uses_cuda: bool = True) -> None:
    """Prepare, fork the workers, and end this process with them. Returns only if stdin is closed without a message.

    prepare: gets the message that `WorkerPool.begin` sent, imports the modules that the work needs, and returns the
        work. The work is a function that every worker runs: it gets an iterator of messages, and a function that sends
        an answer. A fork must be possible after `prepare`: it may start no threads and run no user code.
    uses_cuda: the work may call CUDA. `prepare` must then not use CUDA, not even to ask whether it is available: CUDA
        would not work in the forked workers, and each of them would end with RuntimeError.

    The program's arguments are file descriptors: for each worker, a socket that carries JSON lines both ways. All
    workers end together, even in the middle of their work.
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
        _fork(workers, [int(number) for number in sys.argv[1:]], work, uses_cuda)
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


def _fork(workers: list[int], descriptors: list[int], work: Work, uses_cuda: bool) -> None:
    """Fork a worker for each descriptor, and append its process id to `workers`. In a worker, never returns.

    The first worker leads the workers' process group. The group's id stays valid until that worker is waited for, at
    the end.
    """
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
            if uses_cuda:
                _require_cuda()
            _run(descriptor, work)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)


def _require_cuda() -> None:
    """Raise RuntimeError if CUDA cannot be used in this worker because it was initialised before the fork."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA cannot be used in this worker: an import before the fork has used it")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _run(descriptor: int, work: Work) -> None:
    """Run `work` in a worker, on messages from the socket `descriptor`, and send its answers to the same socket.

    When the caller closes the socket, the whole process group is killed.
    """
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
