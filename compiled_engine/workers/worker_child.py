"""A worker's process, as the one that starts it sees it.

It is a fresh process, not a fork: it inherits no threads and no CUDA context, and the caller's script needs no guard.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from compiled_engine.workers.ring import RingDescriptors

_MAIN = "compiled_engine.workers.worker_main"
# All ranks of a host talk through its loopback interface. NVLink's multicast stays off: a process that is killed may leave
# the switches unusable for others. Symmetric memory is told that devices of one number are not one device, since each
# process sees its own alone, and to give each tensor an allocation of its own, which begins where the tensor does.
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
    """It begins to import what it needs at once, and waits for a StartWorker on its socket.

    device_type: "cuda" for rank's own GPU, the only one that it sees, or "cpu". steps: the ring that it reads;
    results: the one that rank 0 writes. heartbeats: descriptor of their memory.
    """

    def __init__(
        self, rank: int, device_type: str, steps: RingDescriptors, results: RingDescriptors, heartbeats: int
    ) -> None:
        self.socket, other = socket.socketpair()
        passed = [other.fileno(), heartbeats, steps.memory, results.memory, *results.bells, *steps.bells]
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", f"from {_MAIN} import main; main()"),
                    *(device_type, *map(str, passed)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C is the caller's business
                env={**os.environ, **_ENVIRONMENT, **_visible(rank, device_type), "PYTHONPATH": _path()},
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

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it, if it has not."""
        self._process.kill()
        self._process.wait()
        self.socket.close()


def end_all(workers: Sequence[WorkerChild]) -> None:
    """At once: one that waits for another on the device may only end when that one does."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.close()


def _visible(rank: int, device_type: str) -> dict[str, str]:
    """The rank's GPU alone, of those that this process sees."""
    if device_type != "cuda":
        return {}
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return {"CUDA_VISIBLE_DEVICES": visible[rank] if visible else str(rank)}


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)
