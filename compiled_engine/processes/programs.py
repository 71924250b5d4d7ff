"""Main programs of the processes of engine cores and workers: their work before PyTorch is imported."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

from compiled_engine.process.bytecode import keep_bytecode
from compiled_engine.process.child import open_standard_streams
from compiled_engine.process.ending import end_process
from compiled_engine.process.init_cuda import init_cuda
from compiled_engine.process.memory import collection_paused


def core_main() -> None:
    """Run an engine core as this process's main program.

    The arguments are the descriptor of the listening socket, the folder that contains the socket, and the option
    `device`. SIGINT and SIGTERM are ignored, since the starter handles them and may have requests to finish. This
    process ends when the starter closes its connection.
    """
    _begin()
    descriptor, folder, device = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    try:
        init_cuda(device, runs_here=True)  # while PyTorch is imported
        with socket.socket(fileno=descriptor) as listener:
            with collection_paused():  # as the package does
                from compiled_engine.processes.run_core import serve

            serve(listener, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end_process(0)


def worker_main() -> None:
    """Run a rank as this process's main program.

    The arguments are the kind of device, the rank, the ranks' shared folder, and the descriptors from WorkerChild.
    SIGINT and SIGTERM are ignored, since the starter handles them. This process ends when the starter closes its
    connection.
    """
    _begin()
    kind, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    descriptors = [int(number) for number in sys.argv[4:]]
    init_cuda(kind, runs_here=True)  # while PyTorch is imported
    with socket.socket(fileno=descriptors[0]) as connection:
        threading.Thread(target=_exit_without_executor, args=(connection, folder), daemon=True).start()
        with collection_paused():  # as the package does
            from compiled_engine.processes.worker import serve

        serve(connection, kind, rank, folder, descriptors[1:])
    end_process(0)


def _begin() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open_standard_streams()
    keep_bytecode()
    os.dup2(2, 1)  # prints go to stderr, apart from the output of the caller's program


def _exit_without_executor(connection: socket.socket, folder: Path) -> None:
    """Wait until the starter has ended, then remove `folder` and end this process at once, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, 0)  # reports a hang-up only
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
