"""The process of an engine core, as seen by the process that started it or connected to it.

This module is imported without PyTorch.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compiled_engine.process.child import how_it_ended, open_standard_streams, start_process
from compiled_engine.process.init_cuda import core_has_device, given_device

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig

_PROGRAMS = "compiled_engine.processes.programs"
_LONGEST_ADDRESS = 100  # bytes of the whole path; the system allows a few more
_BACKLOG = 128


class RunningCore(Protocol):
    """Interface to an engine core, which runs in a thread, in a child process, or in a process started by another one.

    `socket` is the caller's end of the connection to the core.
    """

    socket: socket.socket

    @property
    def address(self) -> str | None:
        """The address to which further callers can connect; None if they cannot."""
        ...

    def how_it_ended(self, timeout_s: float) -> str:
        """Wait up to `timeout_s` for the core to end. Return text that tells how it ended, if this process can know."""
        ...

    def close(self, timeout_s: float) -> None:
        """Close the socket, and wait up to `timeout_s` for the core to end. May be called repeatedly.

        A process that does not end in time is killed. A core that another process started is not waited for.
        """
        ...


class ForeignCore:
    """RunningCore for a core that another process has started.

    Raises OSError if no process listens at `address`, or if this user may not connect.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address = os.fspath(address)
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(self.address)
        except BaseException:
            self.socket.close()
            raise

    def how_it_ended(self, timeout_s: float) -> str:
        return "it has ended, or the process that started it has"

    def close(self, timeout_s: float) -> None:
        self.socket.close()


class CoreChild:
    """RunningCore in a new process. The process begins its imports immediately, then waits for `start`.

    device: the engine's option `device`. For a GPU, the process creates a CUDA context during the imports. "cpu" if
        other processes use the device.
    environment: variables that are added to this process's environment, or replace variables of it.

    Callers connect to a socket that only this user may open, in a folder that only this user may enter. No process
    inherits a connection, so a caller's connection closes when the caller dies.
    """

    def __init__(self, device: str = "auto", environment: Mapping[str, str] | None = None) -> None:
        open_standard_streams()
        self._folder = _private_folder()
        self.address = str(self._folder / "core.socket")
        self.socket = socket.socket(socket.AF_UNIX)
        self._started = False
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.address)
                os.chmod(self.address, 0o600)
                listener.listen(_BACKLOG)
                self.socket.connect(self.address)  # pending until the core accepts it
                self._process = start_process(
                    _PROGRAMS,
                    [str(listener.fileno()), str(self._folder), device],
                    [listener.fileno()],
                    function="core_main",
                    environment=environment,
                )
        except BaseException:
            self.socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CoreChild:
        """Return a new CoreChild for an engine with these keyword arguments of `LLM`, which need not be valid."""
        return cls(given_device(options) if core_has_device(options) else "cpu", _cluster_of_this_process())

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, frame: bytes) -> None:
        """Send the Start message. Raises nothing if the process has ended; reading the answer reports that.

        frame: the encoded message, so that this module need not import PyTorch.
        """
        self._started = True
        with suppress(OSError):
            self.socket.sendall(frame)

    def clock_ahead_s(self) -> float:
        """Return 0: the core runs on this machine and has the same clock."""
        return 0.0

    def how_it_ended(self, timeout_s: float) -> str:
        return f"its process {how_it_ended(self._process, timeout_s)}"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        if not self._started:  # it may still be importing
            self._process.kill()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # the process removes it itself, unless it was killed


def _private_folder() -> Path:
    """Return a new folder of mode 0700 with a path short enough for a socket's address."""
    folder = tempfile.mkdtemp(prefix="compiled-engine-")
    if len(os.fsencode(folder)) > _LONGEST_ADDRESS - len("/core.socket"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="compiled-engine-", dir="/tmp")
    return Path(folder)


def _cluster_of_this_process() -> dict[str, str]:
    """Return environment variables that give a child process this process's Ray cluster; empty without a cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def device_of_core(config: EngineConfig) -> str:
    """Return the argument `device` of CoreChild for a replica.

    It is "cpu" if worker processes use the device in place of the core's process.
    """
    return "cpu" if config.of_replica(0).parallel.executor == "multiprocess" else config.device.type
