"""On how many devices a model runs, and how it is divided among them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks compute each layer together, one a device, and who runs them: in_process, multiprocess, or
    ray, where a cluster has the replicas, and each runs its devices in one of the other ways.

    data_parallel_size: replicas of the whole, each with devices and requests of its own. stage_layers: the stages that
    a step goes through one after another: how many layers' attention each has; empty where there is but one.
    collectives: auto or nccl, which does without symmetric memory.
    """

    tensor_parallel_size: int
    executor: str
    data_parallel_size: int = 1
    stage_layers: tuple[int, ...] = ()
    collectives: str = "auto"

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_layers))

    @property
    def has_replicas(self) -> bool:
        """Whether cores run in processes of their own, here or elsewhere, among which requests are divided."""
        return self.data_parallel_size > 1 or self.executor == "ray"

    @property
    def devices_per_replica(self) -> int:
        """Devices that a replica runs on."""
        return self.tensor_parallel_size * self.num_stages
