"""A worker's process, as the one that starts it sees it.

It is a fresh process, not a fork: it inherits no threads and no CUDA context, and the caller's script needs no guard.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import psutil

from compiled_engine.process.child import as_this_one
from compiled_engine.workers.ring import RingDescriptors

log = logging.getLogger("compiled_engine")

_MAIN = "compiled_engine.workers.worker_main"
# How long a process that was killed may take to end.
_END_S = 3.0
# All ranks of a host talk through its loopback interface. NVLink's multicast stays off: a process that is killed may
# leave the switches unusable for others. Symmetric memory is told that devices of one number are not one device, since
# for each rank its own is the first, and to give each tensor an allocation of its own, which begins where it does.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}


class WorkerChild:
    """It imports what it needs at once, joins the other ranks, and waits for a StartWorker on its socket.

    gpus: of all ranks, as CUDA_VISIBLE_DEVICES names them; empty on a CPU. Each rank's own is the first that it sees,
    so that all run the same code, and it sees those of the others, whose memory it reads and writes. folder: where it
    finds the others. steps: the ring that it reads; results: the one that the last stage writes. heartbeats: descriptor
    of their memory.
    """

    def __init__(
        self,
        rank: int,
        gpus: Sequence[str],
        folder: Path,
        steps: RingDescriptors,
        results: RingDescriptors,
        heartbeats: int,
    ) -> None:
        self.socket, other = socket.socketpair()
        passed = [other.fileno(), heartbeats, steps.memory, results.memory, *results.bells, *steps.bells]
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", f"from {_MAIN} import main; main()"),
                    *("cuda" if gpus else "cpu", str(rank), str(folder), *map(str, passed)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C is the caller's business
                env={**os.environ, **_ENVIRONMENT, **_visible(rank, gpus), **as_this_one()},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self, timeout_s: float) -> str:
        """Wait for its end; say how it came."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if status >= 0:
            return f"has ended with status {status}"
        name = signal.Signals(-status).name
        return f"was killed by {name}" + ", as when memory runs out" * (name == "SIGKILL")

    def is_stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP, or is dying."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    def is_dying(self) -> bool:
        """Whether it runs no more, though something that its device does may keep its connection open."""
        return self._status() == psutil.STATUS_ZOMBIE

    def _status(self) -> str:
        try:
            status: str = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD
        return status

    def is_killed(self, within_s: float) -> bool:
        """Whether a signal has ended it, or does so within that time."""
        return self.wait(within_s) and self._process.returncode < 0

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, within_s: float) -> None:
        """After `kill`. Within that time it should have ended; what its device still does may hold it up."""
        if not self.wait(within_s):
            log.warning("process %d was killed and has not ended: its device is still busy", self.pid)
        self.socket.close()


def end_all(workers: Sequence[WorkerChild]) -> None:
    """At once: one that waits for another on the device may only end when that one does. Nobody waits for long."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _END_S
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


def visible_gpus(count: int) -> list[str]:
    """The first GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them; fewer where it names fewer."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(index) for index in range(count)]
    # CUDA stops at the first that is none.
    return list(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, given.split(","))))[:count]


def _visible(rank: int, gpus: Sequence[str]) -> dict[str, str]:
    others = [gpu for index, gpu in enumerate(gpus) if index != rank]
    return {"CUDA_VISIBLE_DEVICES": ",".join([gpus[rank], *others])} if gpus else {}
