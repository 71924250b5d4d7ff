"""The processes of all ranks of an engine, and what they share: one way to launch them, early or late.

Early is before PyTorch is imported by whoever launches them, and before anybody has looked at the options: ranks import
it too, and it takes them as long. This module is imported without it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.process.standard_streams import open_standard_streams
from compiled_engine.workers.given_devices import given_device, num_early_workers
from compiled_engine.workers.heartbeat import Heartbeats
from compiled_engine.workers.ring import RingDescriptors
from compiled_engine.workers.worker_child import WorkerChild, end_all, visible_gpus

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig


class LaunchedWorkers:
    """They import what they need and wait to be started. `children`: by rank. `steps`, `results`: see WorkerChild.

    folder: where the ranks will find each other; only this user may enter it.
    """

    def __init__(self, count: int, device: str) -> None:
        """device: the engine's option. Unless it is "cpu", ranks see the GPUs that there may be."""
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
        """Those that the configuration asks for."""
        return cls(config.parallel.devices_per_replica, config.device.type)

    def fit(self, config: EngineConfig) -> bool:
        """Whether these are the workers that the configuration asks for."""
        parallel, count = config.parallel, len(self.children)
        if parallel.executor != "multiprocess" or parallel.has_replicas or parallel.devices_per_replica != count:
            return False
        return config.device.type != "cuda" or self._gpus == visible_gpus(count)

    def close(self) -> None:
        """End them at once; nothing of them is left. May be called again."""
        if self._closed:
            return
        self._closed = True
        end_all(self.children)
        for ring in (self.steps, self.results):
            ring.close()
        self.heartbeats.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def launch_early(options: Mapping[str, Any]) -> LaunchedWorkers | None:
    """The workers of an engine with these keywords of `LLM`; None unless it is plain that it has some."""
    count = num_early_workers(options)
    return LaunchedWorkers(count, given_device(options)) if count else None
