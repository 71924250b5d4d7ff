"""Replicas on the nodes of a Ray cluster. Ray places them and tells of their end; each is a core as on one host.

A replica's devices, and the ranks on them, are on one node: Ray never divides a bundle of a placement group. What
crosses between hosts is what router and core say to each other, a message a step; what ranks say stays on the node.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from compiled_engine.config import EngineConfig
from compiled_engine.core_process.ray_actor import ReplicaActor
from compiled_engine.core_process.ray_core import RayCore

_PLACED_S = 60.0
# Calls of an actor that go on at the same time: one receives, one sends, one asks or closes.
_CALLS = 3


class RayCluster:
    """The cluster that this process is in or that RAY_ADDRESS names, else a new one here, in a folder of its own. A
    cluster that merely runs here may be another user's.

    cores: one for each replica, on as many nodes as there are. Raises ValueError if the cluster is too small,
    RuntimeError if what it has is in use.
    """

    def __init__(self, config: EngineConfig, num_workers: int) -> None:
        """num_workers: see CoreChild."""
        self._is_ours = not ray.is_initialized()
        self._folder: str | None = None
        if self._is_ours:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
            if os.environ.get("RAY_ADDRESS"):
                ray.init(**quiet)
            else:
                self._folder = tempfile.mkdtemp(prefix="ray-")
                ray.init("local", include_dashboard=False, _temp_dir=self._folder, **quiet)
        self._group: Any = None
        try:
            self.cores = self._place(config, num_workers)
        except BaseException:
            self.close()
            raise

    def _place(self, config: EngineConfig, num_workers: int) -> list[RayCore]:
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
            ).remote(config.device.type, num_workers, [os.path.abspath(path) for path in sys.path])
            for number in range(count)
        ]
        return [RayCore(actor, f"replica {number} of {count}") for number, actor in enumerate(actors)]

    def close(self) -> None:
        """Give back what was reserved, and leave the cluster if it was entered here."""
        with suppress(Exception):  # Ray may be gone
            if self._group is not None:
                remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _require_room(count: int, bundle: dict[str, float]) -> None:
    """Raise ValueError unless the nodes, were they idle, could hold so many bundles."""
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
