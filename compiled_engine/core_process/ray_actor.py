"""What runs on a node of a Ray cluster: an actor that starts an engine core in a process of its own there, and passes
on what it and the router say to each other. Ray starts it with the GPUs that it was given."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import ray

from compiled_engine.core_process.core_child import CoreChild
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.ray_environment import differences, own_environment
from compiled_engine.core_process.wire import Start, decode_to_core, encode

_CHUNK = 1 << 20
_EXIT_S = 10.0


class ReplicaActor:
    """RayCore calls its methods, some of them at the same time. What crosses are bytes of messages, and plain values.

    device, num_workers: see CoreChild. paths: where the driver finds modules, such as logits processors; they come
    after the node's own.
    """

    def __init__(self, device: str, num_workers: int, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
        self._child = CoreChild(device, num_workers)
        self._has_started = False

    def node(self) -> tuple[str, str]:
        """The node's id in the cluster, and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def clock(self) -> float:
        """This machine's time.perf_counter."""
        return time.perf_counter()

    def start(self, message: bytes, elapsed_s: float, environment: dict[str, str]) -> list[str]:
        """Have the core start, unless this node cannot run what the driver has resolved: then why.

        message: a Start. elapsed_s: since its timeline began, as each machine has a clock of its own. environment: the
        driver's.
        """
        start = decode_to_core(message)
        assert isinstance(start, Start)
        wrong = differences(environment, own_environment(start.config.device.type))
        if not Path(start.config.model.path).is_dir():
            wrong.append(f"there is no folder {start.config.model.path} with the model")
        if not wrong:
            here = msgspec.structs.replace(start, origin_s=time.perf_counter() - elapsed_s)
            self._child.start(frame(encode(here)))
            self._has_started = True
        return wrong

    def send(self, data: bytes) -> None:
        """To the core. That it has ended, `receive` says."""
        with suppress(OSError):
            self._child.socket.sendall(data)

    def receive(self) -> bytes:
        """What the core says; waits for it. Nothing once it has ended."""
        try:
            return self._child.socket.recv(_CHUNK)
        except OSError:
            return b""

    def how_it_ended(self, timeout_s: float) -> str:
        """See RunningCore."""
        return self._child.how_it_ended(timeout_s)

    def close(self) -> None:
        with suppress(OSError):
            self._child.socket.shutdown(socket.SHUT_RDWR)  # wakes who receives
        self._child.close(_EXIT_S if self._has_started else 0)
