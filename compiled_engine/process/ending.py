"""Ends a process without Python's teardown of imported modules, which takes half a second for PyTorch."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Run this process's exit handlers, flush stdout and stderr, and end the process with `status`.

    If the output cannot be written, raises SystemExit instead, so that Python reports the error.
    """
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status)
