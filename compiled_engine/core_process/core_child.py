"""The engine core in a process of its own, which this process starts and which ends with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_engine.process.child import start_process
from compiled_engine.process.standard_streams import open_standard_streams
from compiled_engine.workers.given_devices import core_has_device, given_device, num_early_workers

_MAIN = "compiled_engine.core_process.core_main"
_LONGEST_ADDRESS = 100  # bytes; the system allows a few more, including the file's name
_BACKLOG = 128


class CoreChild:
    """See RunningCore. The process begins to import what it needs at once, and waits for `start`.

    device: the engine's option; on a GPU the process makes its context meanwhile. num_workers: ranks in processes of
    their own, which have the device instead, and which it launches at once. environment: variables that the process has
    beside the caller's, or instead of them.

    Callers connect to a socket that only this user may open, in a folder that only this user may enter. Nobody
    inherits a connection, so a caller's death closes its own.
    """

    def __init__(
        self, device: str = "auto", num_workers: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
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
                self.socket.connect(self.address)  # it waits there until the core takes it
                self._process = _spawn(listener, self._folder, [device, str(num_workers)], environment)
        except BaseException:
            self.socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CoreChild:
        """The one for these keywords of `LLM`, which nobody has checked."""
        num_workers = num_early_workers(options)
        return cls(given_device(options) if num_workers or core_has_device(options) else "cpu", num_workers)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, frame: bytes) -> None:
        """frame: a Start message. It is encoded elsewhere, so that this module is imported without PyTorch."""
        self._started = True
        self.socket.sendall(frame)

    def clock_ahead_s(self) -> float:
        """Of this machine's time.perf_counter: none, as the core is here."""
        return 0.0

    def how_it_ended(self, timeout_s: float) -> str:
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "its process has closed the connection"
        if status >= 0:
            return f"its process has ended with status {status}"
        name = signal.Signals(-status).name
        return f"its process was killed by {name}" + ", as when memory runs out" * (name == "SIGKILL")

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        if not self._started:  # it may still be importing
            self._process.kill()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # it does so itself, unless it was killed


def _private_folder() -> Path:
    """A new folder of mode 0700, whose path is short enough for a socket's address."""
    folder = tempfile.mkdtemp(prefix="compiled-engine-")
    if len(os.fsencode(folder)) > _LONGEST_ADDRESS - len("/core.socket"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="compiled-engine-", dir="/tmp")
    return Path(folder)


def _spawn(
    listener: socket.socket, folder: Path, about_devices: Sequence[str], environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    arguments = [str(listener.fileno()), str(folder), *about_devices]
    return start_process(_MAIN, arguments, [listener.fileno()], environment=environment)
