"""Starts child processes that run a function of this program, with a given import path, environment and open files.

The processes are not forks, so they inherit no threads and no CUDA context.
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
    """Open the null device as each of the descriptors 0, 1 and 2 that is closed.

    A daemon may have closed them. Files opened later would then get these numbers, and a child process would take them
    for its standard streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def replace_missing_streams() -> None:
    """Call `open_standard_streams`, and set sys.stdin, sys.stdout and sys.stderr where they are None.

    Python sets them to None at its start if their descriptors are closed.
    """
    open_standard_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the process ends


@contextmanager
def environment_variables(wanted: Mapping[str, str], others: Sequence[str] = ()) -> Iterator[None]:
    """Set the environment variables `wanted` within a block, then restore their earlier values.

    others: further variables to restore, which code in the block may set.
    """
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
    """Return a value of PYTHONPATH that gives a child process in the same working directory this process's sys.path.

    In interactive interpreters and notebooks, sys.path contains "" for the working directory; here it becomes ".".
    """
    return os.pathsep.join(path or os.curdir for path in sys.path)


def as_this_one() -> dict[str, str]:
    """Return environment variables that give a child this process's import path and bytecode settings."""
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
    """Start and return a process that imports a module and calls one of its functions, with the caller's import path.

    The process has its own session, so Ctrl-C reaches only the caller. Garbage collection is off while the module is
    imported, see `compiled_engine`.

    arguments: the process's sys.argv[1:]. descriptors: open file descriptors that the process inherits.
    has_input: whether stdin is a pipe; otherwise it is the null device.
    output: the file for stdout and stderr; None: those of the caller.
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
    """Wait up to `timeout_s` for the end of a process that has closed its connection, and describe the end.

    Returns the rest of a sentence about the process, such as "has ended with status 1".
    """
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "has closed its connection"
    if status >= 0:
        return f"has ended with status {status}"
    # Some real-time signals have no name.
    name = signal.Signals(-status).name if -status in [*signal.Signals] else f"signal {-status}"
    return f"was killed by {name}" + ", as when memory runs out" * (name == "SIGKILL")
