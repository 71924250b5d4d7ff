"""The program of the engine core's process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from compiled_engine.process.begin_gpu import begin_gpu
from compiled_engine.process.bytecode import keep_bytecode
from compiled_engine.process.garbage_collection import collection_paused
from compiled_engine.process.standard_streams import open_standard_streams
from compiled_engine.workers.launched_workers import LaunchedWorkers


def main() -> None:
    """Arguments: the file descriptor of the listening socket, the folder that it is in, the option `device`, and how
    many workers there are, which import while this process does.

    SIGINT and SIGTERM are for the process that started this one, which may have requests to finish: this one ends when
    that one has closed its connection.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open_standard_streams()
    keep_bytecode()
    os.dup2(2, 1)  # what is printed here is not the output of the caller's program
    descriptor, folder, device, num_workers = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    workers = None
    try:
        if num_workers:
            workers = LaunchedWorkers(num_workers, device)
        else:
            begin_gpu(device, runs_here=True)  # while PyTorch is imported
        with socket.socket(fileno=descriptor) as listener:
            with collection_paused():  # as the package does
                from compiled_engine.core_process.core_serve import serve

            serve(listener, folder, workers)
    finally:
        if workers is not None:
            workers.close()
        shutil.rmtree(folder, ignore_errors=True)
