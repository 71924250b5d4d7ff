"""The program of a worker's process."""

from __future__ import annotations

import os
import signal
import socket
import sys

from compiled_engine.process.cuda_context import cuda_context
from compiled_engine.process.garbage_collection import collection_paused


def main() -> None:
    """Arguments: the kind of device, then the descriptors that worker_child passes.

    Ctrl-C and the like are for the process that started this one; this one ends when that one has closed its socket.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what is printed here is not the output of the caller's program
    if sys.argv[1] == "cuda":
        cuda_context(0)  # while PyTorch is imported
    descriptors = [int(number) for number in sys.argv[2:]]
    with socket.socket(fileno=descriptors[0]) as connection:
        with collection_paused():  # as the package does
            from compiled_engine.workers.worker import serve

        serve(connection, descriptors[1:])
