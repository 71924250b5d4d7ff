"""The programs of an engine core's process and of a worker's: what they do before they import PyTorch."""

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
    """Run an engine core. Arguments: the descriptor of the listening socket, the folder that it is in, and the option
    `device`.

    SIGINT and SIGTERM are for the process that started this one, which may have requests to finish: this one ends when
    that one has closed its connection.
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
    """Run a rank. Arguments: the kind of device, the rank, the folder that ranks share, and the descriptors that
    WorkerChild passes.

    Ctrl-C and the like are for the process that started this one; this one ends when that one has closed its socket.
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
    os.dup2(2, 1)  # what is printed here is not the output of the caller's program


def _exit_without_executor(connection: socket.socket, folder: Path) -> None:
    """End this process at once, whatever it is doing, when its starter has ended."""
    poll = select.poll()
    poll.register(connection, 0)  # reports a hang-up only
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
