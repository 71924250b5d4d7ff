"""An engine core on a node of a Ray cluster, as the router sees it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from compiled_engine.core_process.frames import FrameReader
from compiled_engine.core_process.ray_environment import own_environment
from compiled_engine.core_process.wire import Start, decode_to_core

_CHUNK = 1 << 20
_KILLED_S = 1.0


class RayCore:
    """See RunningCore. Two threads pass bytes between `socket` and a ReplicaActor, one each way.

    name: for people. node: where it is.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self.address: str | None = None
        self.socket, self._own = socket.socketpair()
        self.node = "a node that is not known"
        self._actor, self._name = actor, name
        self._lost: str | None = None

    def start(self, frame: bytes) -> None:
        """frame: a Start message. Raises ValueError if the node is not fit for it, RuntimeError if it is lost."""
        (message,) = FrameReader().feed(frame)
        start = decode_to_core(message)
        assert isinstance(start, Start)
        elapsed_s, environment = time.perf_counter() - start.origin_s, own_environment(start.config.device.type)
        try:
            node_id, node_address = ray.get(self._actor.node.remote())
            self.node = f"{node_address} ({node_id[:8]})"
            wrong = ray.get(self._actor.start.remote(bytes(message), elapsed_s, environment))
        except RayError as error:
            raise RuntimeError(f"{self._name} on Ray did not start: {_first_line(error)}") from error
        if wrong:
            raise ValueError(f"{self._name} cannot run on node {self.node} of the Ray cluster: {'; '.join(wrong)}")
        for pump in (self._pump_in, self._pump_out):
            threading.Thread(target=pump, name=f"{self._name} on Ray", daemon=True).start()

    def clock_ahead_s(self) -> float:
        """How far this machine's time.perf_counter is ahead of the node's, to half the time of a call."""
        if self.node.startswith(ray.util.get_node_ip_address()):
            return 0.0
        before = time.perf_counter()
        there: float = ray.get(self._actor.clock.remote())
        return (before + time.perf_counter()) / 2 - there

    def how_it_ended(self, timeout_s: float) -> str:
        if self._lost is None:
            try:
                how = ray.get(self._actor.how_it_ended.remote(timeout_s), timeout=timeout_s + _KILLED_S)
                return f"{how}, on node {self.node} of the Ray cluster"
            except (RayError, TimeoutError) as error:
                self._lost = _first_line(error)
        return f"node {self.node} of the Ray cluster, or its actor there, is lost: {self._lost}"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        with suppress(Exception):  # Ray may be gone, or the node
            ray.get(self._actor.close.remote(), timeout=max(timeout_s, _KILLED_S))
        with suppress(Exception):
            ray.kill(self._actor)
        self._own.close()

    def _pump_in(self) -> None:
        """What the core says; at its end, or the actor's, `socket` ends."""
        try:
            while data := ray.get(self._actor.receive.remote()):
                self._own.sendall(data)
        except RayError as error:
            self._lost = _first_line(error)
        except OSError:
            pass
        with suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)

    def _pump_out(self) -> None:
        """What the router says, in its order: one call at a time. What comes meanwhile is the next call's."""
        with suppress(RayError, OSError):
            while data := self._own.recv(_CHUNK):
                ray.get(self._actor.send.remote(data))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
