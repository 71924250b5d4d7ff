"""Run an engine core in a process or thread, from the Start message until the caller is gone."""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from compiled_engine.engine.control import Failed
from compiled_engine.process.memory import freeze_heap
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_server import CoreServer
from compiled_engine.processes.start_cores import start_cores
from compiled_engine.processes.wire import Start, ToCore, decode_to_core, encode
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory

log = logging.getLogger("compiled_engine")
_WATCH_S = 0.5

GivenProcessors = Sequence[LogitsProcessor | LogitsProcessorFactory | str]


def run_core(
    start: Start,
    connection: Connection[ToCore],
    processors: GivenProcessors,
    listener: socket.socket | None = None,
    given: MutableMapping[str, Any] | None = None,
    when_started: Callable[[], None] = lambda: None,
) -> None:
    """Start a core and serve requests until the other end of `connection` closes.

    If the start fails, the error is sent over `connection`, and nothing is raised. A step's error is sent to all
    clients, then raised. `when_started` is called when the start has succeeded or failed. See start_core for
    `processors`, and CoreServer for `listener` and `given`.
    """
    timeline = Timeline(start.origin_s, start.spans)
    so_far = max((span.start_s + span.seconds for span in start.spans), default=0.0)
    timeline.add("wait for the core's process", so_far, timeline.now() - so_far)
    progress = RichProgress() if start.progress else SilentProgress()
    try:
        core = start_cores(start.config, progress, processors, timeline)
    except BaseException as error:
        with suppress(OSError):
            connection.send(frame(encode(Failed.of(error))))
        connection.close()
        return
    finally:
        when_started()
    try:
        CoreServer(core, start.frontend, connection, listener, given).run()
    finally:
        core.close()


def serve(listener: socket.socket, folder: Path) -> None:
    """Accept one connection from `listener`, start the core that its Start message describes, and serve requests.

    Returns when the process at the other end closes the connection. If that process ends while the core starts,
    `folder` is removed and this process exits with code 1.
    """
    connection: Connection[ToCore] = Connection(listener.accept()[0], decode_to_core)
    start = _receive_start(connection)
    if start is None:
        return
    torch.set_num_threads(start.num_threads)
    started = threading.Event()

    def when_started() -> None:
        freeze_heap()
        started.set()

    threading.Thread(target=_exit_without_caller, args=(connection.fileno(), started, folder), daemon=True).start()

    run_core(start, connection, start.logits_processors, listener, when_started=when_started)


def _receive_start(connection: Connection[ToCore]) -> Start | None:
    """Wait for the Start message and return it. Returns None if the caller has ended."""
    messages: list[ToCore] = []
    try:
        while not messages:
            connection.wait_readable()
            messages = connection.receive()
    except (EOFError, OSError):
        return None
    (start,) = messages
    assert isinstance(start, Start)
    return start


def _exit_without_caller(descriptor: int, started: threading.Event, folder: Path) -> None:
    """Remove `folder` and exit this process if the other end of a socket hangs up before `started` is set.

    descriptor: the socket's; it is polled, but not read. Runs in a thread of its own.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # reports a hang-up only
    while not started.is_set():
        if poll.poll(_WATCH_S * 1000) and not started.is_set():
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


class CoreThread:
    """An engine core that runs in a thread of the caller's process.

    Implements RunningCore: the caller talks to the core over a socket, as to a core in its own process.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.socket, self._other = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(self, start: Start, processors: GivenProcessors, given: MutableMapping[str, Any]) -> None:
        """Start the thread, which runs the core that the Start message describes.

        processors: logits processors, see start_core. given: see CoreServer; the caller adds an entry before it sends
        the request that the entry is for.
        """
        arguments = (start, self._other, processors, given)
        self._thread = threading.Thread(target=_run_thread, args=arguments, name="engine core", daemon=True)
        self._thread.start()

    def how_it_ended(self, timeout_s: float) -> str:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return "its thread has closed the connection"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        if self._thread is None:
            self._other.close()
        else:
            self._thread.join(timeout_s)


def _run_thread(
    start: Start, sock: socket.socket, processors: GivenProcessors, given: MutableMapping[str, Any]
) -> None:
    connection: Connection[ToCore] = Connection(sock, decode_to_core)
    try:
        run_core(start, connection, processors, given=given)
    except Exception:
        log.exception("the engine core has ended")
