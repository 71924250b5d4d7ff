"""A fresh process of this program: no fork, so it inherits no threads and no CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from compiled_engine.process.bytecode import bytecode_environment


def import_path() -> str:
    """This process's, as PYTHONPATH of one that starts in the same folder: a prompt and a notebook import from there,
    which is "" in sys.path, and which PYTHONPATH needs another name for."""
    return os.pathsep.join(path or os.curdir for path in sys.path)


def as_this_one() -> dict[str, str]:
    """Variables by which a Python process imports what this one does, and as this one does."""
    return {"PYTHONPATH": import_path(), **bytecode_environment()}


def start_process(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    *,
    has_input: bool = False,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A process that runs `main()` of a module, with the caller's import path and these open file descriptors.

    It has a session of its own: Ctrl-C is the caller's business. While it imports the module nothing is collected, see
    `compiled_engine`. has_input: its stdin is a pipe. environment: variables
    that it has beside the caller's, or instead of them.
    """
    program = f"import gc; gc.disable(); from {module} import main; gc.enable(); main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments],
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
        env={**os.environ, **(environment or {}), **as_this_one()},
    )
