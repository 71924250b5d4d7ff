"""Start fresh processes of this program, and control what they inherit: import path, environment, standard streams.

They are not forks, so they inherit no threads and no CUDA context.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from compiled_engine.process.bytecode import bytecode_environment


def open_standard_streams() -> None:
    """Open closed standard streams on the null device.

    A daemon may have closed them; their numbers would then go to the next descriptors opened, which child processes are
    meant to inherit.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def replace_missing_streams() -> None:
    """Open closed standard streams on the null device, also as Python's objects, which are None if closed at its
    start."""
    open_standard_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the process ends


@contextmanager
def environment_variables(wanted: Mapping[str, str], others: Sequence[str] = ()) -> Iterator[None]:
    """Set environment variables within a block, then restore them; also restore `others`, which the block may set."""
    before = {name: os.environ.get(name) for name in (*wanted, *others)}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def import_path() -> str:
    """Return sys.path as a PYTHONPATH for child processes with the same working directory.

    Interactive interpreters and notebooks have the working directory in sys.path as "". PYTHONPATH needs another name
    for it.
    """
    return os.pathsep.join(path or os.curdir for path in sys.path)


def as_this_one() -> dict[str, str]:
    """Return environment variables that make a Python process import the same modules, with the same bytecode
    settings."""
    return {"PYTHONPATH": import_path(), **bytecode_environment()}


def start_process(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    *,
    function: str = "main",
    has_input: bool = False,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that runs a function of a module, with the caller's import path and these open descriptors.

    It has its own session, so Ctrl-C only reaches the caller. Garbage collection is off while it imports the module,
    see `compiled_engine`. has_input: its stdin is a pipe. output: for stdout and stderr; None for the caller's.
    environment: variables that are added to the caller's or replace them.
    """
    program = f"import gc; gc.disable(); from {module} import {function}; gc.enable(); {function}()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments],
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=descriptors,
        start_new_session=True,
        env={**os.environ, **(environment or {}), **as_this_one()},
    )


def how_it_ended(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Wait for the end of a process that has closed its connection, and describe it."""
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "has closed its connection"
    if status >= 0:
        return f"has ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + ", as when memory runs out" * (name == "SIGKILL")
