"""Runs replicas on the nodes of a Ray cluster. Ray places them and reports their end.

Each replica runs a core as on a single host. A replica's devices, and the ranks on them, are on one node: Ray never
divides a bundle of a placement group. Only messages between router and core cross hosts, one per step; messages between
ranks stay on the node.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from compiled_engine.config import EngineConfig
from compiled_engine.process.init_cuda import gpu_name
from compiled_engine.processes.channel import FrameReader, frame
from compiled_engine.processes.core_child import CoreChild, device_of_core
from compiled_engine.processes.wire import Start, decode_to_core, encode

PACKAGES = ("compiled-engine", "torch", "triton", "ray", "msgspec")


def own_environment(device_type: str) -> dict[str, str]:
    """Return, by name, the versions of Python, of torch and other PACKAGES, and of CUDA, and the name of the GPU.

    CUDA and the GPU are included if device_type is "cuda". Creates no context on the GPU.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["GPU"] = gpu_name(_first_gpu()) or "none"
    return found


def differences(driver: Mapping[str, str], node: Mapping[str, str]) -> list[str]:
    """Return a text for each entry of own_environment in which a node differs from the driver; [] if there are none."""
    names = dict.fromkeys((*driver, *node))
    return [
        f"{name} is {node.get(name, 'not there')}, the driver's is {driver.get(name, 'not there')}"
        for name in names
        if driver.get(name) != node.get(name)
    ]


_CHUNK = 1 << 20
_EXIT_S = 10.0


class ReplicaActor:
    """Ray actor that runs an engine core. RayCore calls its methods, some of them concurrently.

    device: see CoreChild. paths: the driver's import path, for modules such as logits processors. Those of its folders
    that exist on this node are appended to this process's import path.
    """

    def __init__(self, device: str, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
        self._child = CoreChild(device, _own_gpus())
        self._has_started = False

    def node(self) -> tuple[str, str]:
        """Return the node's id in the cluster, and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def clock(self) -> float:
        """Return the current time.perf_counter of this machine, in seconds."""
        return time.perf_counter()

    def start(self, message: bytes, elapsed_s: float, environment: dict[str, str]) -> list[str]:
        """Start the core and return []. If this node cannot run the driver's configuration, return the reasons instead.

        `message` is an encoded Start. `elapsed_s` is the time since the message's timeline began. It is not a point in
        time, since clocks of machines differ. `environment` is the driver's own_environment.
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
        """Send bytes to the core. Raises nothing if the core has ended; `receive` reports that."""
        with suppress(OSError):
            self._child.socket.sendall(data)

    def receive(self) -> bytes:
        """Wait for bytes from the core, and return them; empty once the core has ended."""
        try:
            return self._child.socket.recv(_CHUNK)
        except OSError:
            return b""

    def how_it_ended(self, timeout_s: float) -> str:
        """Return text that tells how the core ended, see RunningCore."""
        return self._child.how_it_ended(timeout_s)

    def close(self) -> None:
        with suppress(OSError):
            self._child.socket.shutdown(socket.SHUT_RDWR)  # wakes the receiver
        self._child.close(_EXIT_S if self._has_started else 0)


def _own_gpus() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs that Ray assigned to this process; empty if it assigned none.

    Ray does not set the variable itself if the user sets RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES.
    """
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU") if ray.is_initialized() else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _first_gpu() -> int:
    """Return the index of the first GPU that Ray assigned to this process, among the GPUs that the process sees.

    It is 0 if CUDA_VISIBLE_DEVICES is set, since the process then sees only its own GPUs.
    """
    assigned = _own_gpus().get("CUDA_VISIBLE_DEVICES", "")
    first = assigned.partition(",")[0]
    return int(first) if first.isdecimal() and os.environ.get("CUDA_VISIBLE_DEVICES") is None else 0


_KILLED_S = 1.0


class RayCore:
    """RunningCore on another node. Two threads pass bytes between `socket` and a ReplicaActor, one in each direction.

    actor: handle of the ReplicaActor. name: the replica's name in messages to users. node: the node on which the core
    runs, as text.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self.address: str | None = None
        self.socket, self._own = socket.socketpair()
        self.node = "a node that is not known"
        self._actor, self._name = actor, name
        self._host = ""  # IP address of the node
        self._lost: str | None = None

    def start(self, frame: bytes) -> None:
        """Send the Start message. frame: the message, encoded.

        Raises ValueError if the node cannot run the configuration, and RuntimeError if the node is lost.
        """
        (message,) = FrameReader().feed(frame)
        start = decode_to_core(message)
        assert isinstance(start, Start)
        elapsed_s, environment = time.perf_counter() - start.origin_s, own_environment(start.config.device.type)
        try:
            node_id, self._host = ray.get(self._actor.node.remote())
            self.node = f"{self._host} ({node_id[:8]})"
            wrong = ray.get(self._actor.start.remote(bytes(message), elapsed_s, environment))
        except RayError as error:
            raise RuntimeError(f"{self._name} on Ray did not start: {_reason(error)}") from error
        if wrong:
            raise ValueError(f"{self._name} cannot run on node {self.node} of the Ray cluster: {'; '.join(wrong)}")
        for pump in (self._pump_in, self._pump_out):
            threading.Thread(target=pump, name=f"{self._name} on Ray", daemon=True).start()

    def clock_ahead_s(self) -> float:
        """Return the seconds by which this machine's time.perf_counter is ahead of the node's.

        The result is accurate to half the time of a call to the node.
        """
        if self._host == ray.util.get_node_ip_address():
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
                self._lost = _reason(error)
        return f"node {self.node} of the Ray cluster, or its actor there, is lost: {self._lost}"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        with suppress(Exception):  # Ray may be gone, or the node
            ray.get(self._actor.close.remote(), timeout=max(timeout_s, _KILLED_S))
        with suppress(Exception):
            ray.kill(self._actor)
        self._own.close()

    def _pump_in(self) -> None:
        """Pass bytes from the actor to `socket`. When the core or its actor ends, end the connection of `socket`."""
        try:
            while data := ray.get(self._actor.receive.remote()):
                self._own.sendall(data)
        except RayError as error:
            self._lost = _reason(error)
        except OSError:
            pass
        with suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)

    def _pump_out(self) -> None:
        """Pass bytes from `socket` to the actor in order, with one call at a time.

        Bytes that arrive during a call go with the next call.
        """
        with suppress(RayError, OSError):
            while data := self._own.recv(_CHUNK):
                ray.get(self._actor.send.remote(data))


def _reason(error: BaseException) -> str:
    """Return the reason of an error in one line. The error may have occurred in an actor.

    Ray's text for an error in an actor begins with the position in the code and ends with the exception.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "ray::" in lines[0] else lines[0]


_PLACED_S = 60.0
_ANSWER_S = 10.0
# Concurrent calls of an actor: one receives, one sends, one queries or closes.
_CALLS = 3


class RayCluster:
    """A Ray cluster, and the replicas' cores on its nodes.

    The cluster is the one that this process has joined, otherwise the one that RAY_ADDRESS names. Without either, a new
    cluster is started on this host, in a folder of its own, since a running cluster may be another user's.

    `cores` has one RayCore per replica, spread over the nodes. Raises ValueError if the cluster is too small or does
    not answer, and RuntimeError if its resources are in use.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._is_ours = not ray.is_initialized()
        self._folder: str | None = None
        self._group: Any = None
        try:
            if self._is_ours:
                self._enter()
            self.cores = self._place(config)
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if os.environ.get("RAY_ADDRESS"):
            _require_answer(os.environ["RAY_ADDRESS"])
            ray.init(**quiet)
        else:
            self._folder = tempfile.mkdtemp(prefix="ray-")
            ray.init("local", include_dashboard=False, _temp_dir=self._folder, **quiet)

    def _place(self, config: EngineConfig) -> list[RayCore]:
        parallel = config.parallel
        count, share = parallel.data_parallel_size, parallel.devices_per_replica
        on_gpus = config.device.type == "cuda"
        bundle: dict[str, float] = {"CPU": 1, "GPU": share} if on_gpus else {"CPU": share}
        _require_room(count, bundle)
        self._group = placement_group([bundle] * count, strategy="SPREAD")
        if not self._group.wait(_PLACED_S):
            raise RuntimeError(
                f"the Ray cluster has no room for {count} replicas of {_shown(bundle)} each within {_PLACED_S:.0f} s; "
                f"free are {_shown(ray.available_resources())}"
            )
        make = ray.remote(ReplicaActor)
        actors = [
            make.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote(device_of_core(config), [os.path.abspath(path) for path in sys.path])
            for number in range(count)
        ]
        return [RayCore(actor, f"replica {number} of {count}") for number, actor in enumerate(actors)]

    def close(self) -> None:
        """Release the reserved resources. Leave the cluster if this object has joined or started it."""
        with suppress(Exception):  # Ray may be gone
            if self._group is not None:
                remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _require_answer(address: str) -> None:
    """Raise ValueError if `address` is host:port and nothing listens there. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"RAY_ADDRESS is {address!r}, but no cluster answers there: {error}") from error


def _require_room(count: int, bundle: dict[str, float]) -> None:
    """Raise ValueError unless the nodes, if idle, could hold `count` bundles. bundle: amounts by resource name."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = sum(min(math.floor(node.get(name, 0) / needed) for name, needed in bundle.items()) for node in nodes)
    if most < count:
        raise ValueError(
            f"data_parallel_size is {count}, and each replica needs {_shown(bundle)} on one node, but the Ray cluster "
            f"of {len(nodes)} nodes has {_shown(ray.cluster_resources())}; allowed: at most {most}"
        )


def _shown(resources: dict[str, float]) -> str:
    found = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources]
    return " and ".join(found) or "nothing"
