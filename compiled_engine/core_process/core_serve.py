"""What the engine core's process runs once it has imported PyTorch."""

from __future__ import annotations

import os
import select
import shutil
import socket
import threading
from pathlib import Path

import torch

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.run_core import run_core
from compiled_engine.core_process.wire import Start, ToCore, decode_to_core
from compiled_engine.process.garbage_collection import leave_alone_what_is_there
from compiled_engine.workers.launched_workers import LaunchedWorkers

_WATCH_S = 0.5


def serve(listener: socket.socket, folder: Path, workers: LaunchedWorkers | None) -> None:
    """Take the starter's connection from `listener`, start what it asks for, and serve until it is gone.

    folder: what to remove if the starter goes while the core starts, which ends this process. workers: see
    start_core.
    """
    connection: Connection[ToCore] = Connection(listener.accept()[0], decode_to_core)
    start = _receive_start(connection)
    if start is None:
        return
    torch.set_num_threads(start.num_threads)
    started = threading.Event()

    def when_started() -> None:
        leave_alone_what_is_there()
        started.set()

    threading.Thread(target=_exit_without_caller, args=(connection.fileno(), started, folder), daemon=True).start()

    run_core(
        start,
        connection,
        start.logits_processors,
        listener,
        when_started=when_started,
        workers=workers,
    )


def _receive_start(connection: Connection[ToCore]) -> Start | None:
    """None if the caller is gone."""
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
    """End the process if the caller goes while the core starts: until it has, nobody reads the socket."""
    poll = select.poll()
    poll.register(descriptor, 0)  # tells of a hang-up alone
    while not started.is_set():
        if poll.poll(_WATCH_S * 1000) and not started.is_set():
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
