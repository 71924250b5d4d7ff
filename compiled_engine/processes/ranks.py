"""The processes of an engine's ranks and their shared resources, as seen by the process that launches them."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from compiled_engine.process.child import how_it_ended, open_standard_streams, start_process
from compiled_engine.processes.ring import RingDescriptors

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig

log = logging.getLogger("compiled_engine")

_EVERY_S = 0.5  # between heartbeats
_WORD = 8
_PROGRAMS = "compiled_engine.processes.programs"
# How long a killed process may take to end.
_END_S = 3.0
# All ranks of a host communicate over its loopback interface. NVLink's multicast stays off: a killed process may leave
# the switches unusable for others. Symmetric memory is configured for ranks that all use device number 0, and for one
# allocation per tensor, which begins where the tensor does.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}


class Heartbeats:
    """The time of each rank's last heartbeat, in shared memory: seconds of time.monotonic, 0 before the first."""

    def __init__(self, num_ranks: int, descriptor: int | None = None):
        """Create the shared memory for the ranks' heartbeats, or map existing memory.

        descriptor: memory that another process has created; None: create it.
        """
        self.descriptor = descriptor
        if self.descriptor is None:
            self.descriptor = os.memfd_create("compiled-engine-heartbeats", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, num_ranks * _WORD)
        self._map = mmap.mmap(self.descriptor, num_ranks * _WORD)
        self._times = memoryview(self._map).cast("d")

    def last_s(self, rank: int) -> float:
        """Return the time of the rank's last heartbeat, in seconds of time.monotonic; 0 before its first."""
        return self._times[rank]

    def beat(self, rank: int) -> None:
        """Start a thread that writes the rank's heartbeats as long as this process runs Python."""
        threading.Thread(target=self._beat, args=(rank,), name="heartbeat", daemon=True).start()

    def _beat(self, rank: int) -> None:
        while True:
            self._times[rank] = time.monotonic()
            time.sleep(_EVERY_S)

    def close(self) -> None:
        self._times.release()
        self._map.close()
        assert self.descriptor is not None
        os.close(self.descriptor)


class WorkerChild:
    """A worker process. It imports its modules immediately, joins the other ranks, and waits for a StartWorker message.

    gpus: all ranks' GPUs by their names in CUDA_VISIBLE_DEVICES; empty on a CPU. Each rank sees its own GPU as number
        0, so that all ranks run the same code. It also sees the other GPUs, to access their memory.
    folder: the folder through which the ranks find each other.
    steps, results: ring buffers of steps and results. RankLayout.result_rank writes the results.
    heartbeats: descriptor of the memory of Heartbeats.
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
            self._process = start_process(
                _PROGRAMS,
                ["cuda" if gpus else "cpu", str(rank), str(folder), *map(str, passed)],
                passed,
                function="worker_main",
                environment=_ENVIRONMENT | _visible(rank, gpus),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self, timeout_s: float) -> str:
        """Wait up to `timeout_s` for the process to end. Return text that tells how it ended."""
        return how_it_ended(self._process, timeout_s)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped, for example by SIGSTOP, or is a zombie."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    def is_dying(self) -> bool:
        """Return whether the process is a zombie: it has ended, but work on its device may keep its connection open."""
        return self._status() == psutil.STATUS_ZOMBIE

    def _status(self) -> str:
        try:
            status: str = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD
        return status

    def is_killed(self, within_s: float) -> bool:
        """Return whether a signal has ended the process, or ends it within `within_s` seconds."""
        return self.wait(within_s) and self._process.returncode < 0

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the process to end. Return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, within_s: float) -> None:
        """Wait up to `within_s` for a killed process to end, then close the connection.

        Logs a warning if the process has not ended by then: work on its device may block it.
        """
        if not self.wait(within_s):
            log.warning("process %d was killed and has not ended: its device is still busy", self.pid)
        self.socket.close()


def end_all(workers: Sequence[WorkerChild]) -> None:
    """Kill all workers, then wait a few seconds for their end.

    All workers are killed before waiting, since a rank that waits for another rank on the device may only end after it.
    """
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _END_S
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


def visible_gpus(count: int) -> list[str]:
    """Return the first `count` GPUs visible to this process, by their names in CUDA_VISIBLE_DEVICES.

    The result is shorter if the variable names fewer GPUs. If the variable is not set, the result is the indices from 0
    to `count` - 1, even if there are fewer GPUs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(index) for index in range(count)]
    # CUDA ignores everything from the first invalid name on.
    return list(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, given.split(","))))[:count]


def _visible(rank: int, gpus: Sequence[str]) -> dict[str, str]:
    others = [gpu for index, gpu in enumerate(gpus) if index != rank]
    return {"CUDA_VISIBLE_DEVICES": ",".join([gpus[rank], *others])} if gpus else {}


class LaunchedWorkers:
    """The worker processes of all ranks, which import their modules and wait for a StartWorker message.

    `children` are the workers by rank, `steps` and `results` the ring buffers to and from them. `folder` is where the
    ranks will find each other; only this user may enter it.
    """

    def __init__(self, count: int, device: str) -> None:
        """Launch `count` workers. device: the kind of device; unless it is "cpu", the ranks see the available GPUs."""
        open_standard_streams()
        self._gpus = [] if device == "cpu" else visible_gpus(count)
        self.heartbeats = Heartbeats(count)
        self.steps, self.results = RingDescriptors.make(count), RingDescriptors.make(1)
        self.folder = Path(tempfile.mkdtemp(prefix="compiled-engine-"))
        self.children: list[WorkerChild] = []
        self._closed = False
        try:
            assert self.heartbeats.descriptor is not None
            for rank in range(count):
                self.children.append(
                    WorkerChild(rank, self._gpus, self.folder, self.steps, self.results, self.heartbeats.descriptor)
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, config: EngineConfig) -> LaunchedWorkers:
        """Return new workers, one for each rank of a replica with this configuration."""
        return cls(config.parallel.devices_per_replica, config.device.type)

    def close(self) -> None:
        """End the workers immediately, and free their resources. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        end_all(self.children)
        for ring in (self.steps, self.results):
            ring.close()
        self.heartbeats.close()
        shutil.rmtree(self.folder, ignore_errors=True)
