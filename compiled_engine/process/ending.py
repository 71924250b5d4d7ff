"""The end of a process: Python would first take down all that was imported, which takes PyTorch half a second."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End this process at once, after its exit handlers. For a program whose work is done, and all that waits for it.

    What cannot be written by then is an error, which Python reports.
    """
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status)
