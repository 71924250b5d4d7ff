"""Numbers the ranks of data, pipeline and tensor parallelism, and connects them."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from compiled_engine.config import EngineConfig, ParallelConfig
from compiled_engine.parallel.gloo import GlooGroup, all_reduce_min, join
from compiled_engine.parallel.group import FakeGroup, Group
from compiled_engine.parallel.rank_share import LayerShare, local_model
from compiled_engine.parallel.stages import StageLink, stages_of

if TYPE_CHECKING:
    from compiled_engine.parallel.gpu_groups import NcclGroup

log = logging.getLogger("compiled_engine")
# Default number of rows whose logits are computed at once: a chunk of a prompt.
_LOGITS_ROWS = 256


@dataclass(frozen=True)
class RankPlace:
    """The coordinates of a rank, counted from 0: replica (data), pipeline stage, and tensor-parallel rank (share)."""

    data: int
    stage: int
    share: int


@dataclass(frozen=True)
class RankLayout:
    """Numbering of ranks. The tensor-parallel ranks of a stage communicate most, so their numbers are consecutive."""

    tensor: int  # ranks that share each layer
    pipeline: int = 1  # stages
    data: int = 1  # replicas

    @classmethod
    def of_replica(cls, parallel: ParallelConfig) -> RankLayout:
        """Return the layout of one replica's ranks."""
        return cls(parallel.tensor_parallel_size, parallel.num_stages)

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def result_rank(self) -> int:
        """Number, within its replica, of the rank that reports a step's sampled tokens."""
        return (self.pipeline - 1) * self.tensor

    def samples(self, rank: int) -> bool:
        """Return whether a rank of a replica samples tokens. All ranks of the last stage do."""
        return self.place(rank).stage == self.pipeline - 1

    @property
    def can_drop_steps(self) -> bool:
        """Whether the ranks can drop steps that have been started: only with a single stage.

        Between stages, the transfers of a dropped step would stay pending.
        """
        return self.pipeline == 1

    def place(self, rank: int) -> RankPlace:
        """Return a rank's coordinates. Raises IndexError for a rank that does not exist."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank is {rank}; allowed: 0 to {self.size - 1}")
        rest, share = divmod(rank, self.tensor)
        data, stage = divmod(rest, self.pipeline)
        return RankPlace(data, stage, share)

    def name(self, rank: int) -> str:
        """Return a readable name such as "rank 1 of 4". It includes replica and stage if there are several."""
        place = self.place(rank)
        parts = (("replica", place.data, self.data), ("stage", place.stage, self.pipeline))
        told = [f"{what} {index} of {count}" for what, index, count in parts if count > 1]
        return f"rank {rank} of {self.size}" + (f" ({', '.join(told)})" if told else "")


def join_ranks(device: str, rank: int, size: int, folder: Path) -> None:
    """Make this process rank `rank` of `size`, and wait for all ranks.

    folder: an empty folder, through which the ranks find each other. device: "cuda" initialises the GPU if one is
    available, and lets the ranks use NCCL.
    """
    on_gpu = device == "cuda" and torch.cuda.is_available()
    if on_gpu:
        with suppress(RuntimeError):  # the first computation raises the error again
            torch.zeros(1, device="cuda:0")
    if size > 1:
        join("cpu:gloo,cuda:nccl" if on_gpu and dist.is_nccl_available() else "gloo", rank, size, folder)


class Connections(NamedTuple):
    """The connections of one rank to other ranks."""

    group: Group  # of the ranks with the same layers
    link: StageLink | None = None  # to other stages, if any


def connect(config: EngineConfig, rank: int) -> Connections:
    """Connect this rank to the other ranks, which have joined, and wait for them.

    On a CPU, collectives use gloo. On GPUs they use symmetric memory, or NCCL if the options request it, the model's
    dtype is float16, or the GPUs cannot access each other's memory. Without tensor parallelism, the group is a
    FakeGroup of one rank.
    """
    parallel, on_gpu = config.parallel, config.device.type == "cuda"
    layout = RankLayout.of_replica(parallel)
    if layout.size == 1:
        return Connections(FakeGroup())
    if on_gpu:
        torch.cuda.set_device(config.device)
    stage = stages_of(parallel.stage_layers, config.model.num_layers)[layout.place(rank).stage]
    group = _group(config, layout, stage)
    if stage.count == 1:
        return Connections(group)
    return Connections(group, StageLink(stage, rank, layout.tensor, config.device))


def _group(config: EngineConfig, layout: RankLayout, stage: LayerShare) -> Group:
    if layout.tensor == 1:
        return FakeGroup(all_reduce_min=all_reduce_min)
    members = dist.group.WORLD
    if stage.count > 1:  # every rank must create every group
        ranks = [list(range(first, first + layout.tensor)) for first in range(0, layout.size, layout.tensor)]
        members = [dist.new_group(numbers) for numbers in ranks][stage.index]
    assert members is not None
    if config.device.type != "cuda":
        return GlooGroup(members)
    from compiled_engine.parallel.gpu_groups import SUMMED_DTYPES, NcclGroup, SymmetricMemoryGroup

    nccl = NcclGroup(members, config.device)
    if config.parallel.collectives == "nccl":
        return _connected(nccl)
    symmetric: SymmetricMemoryGroup | None = None
    try:
        if config.model.dtype not in SUMMED_DTYPES:
            raise RuntimeError(f"it sums only {' and '.join(map(str, SUMMED_DTYPES))}")
        row_bytes = config.model.hidden_size * config.model.dtype.itemsize
        symmetric = SymmetricMemoryGroup(
            nccl, _largest_bytes(config), row_bytes, config.scheduler.max_num_batched_tokens
        )
    except RuntimeError as error:
        log.warning("rank %d does without symmetric memory, its collectives are NCCL's: %s", dist.get_rank(), error)
    if nccl.all_reduce_min(symmetric is not None) and symmetric is not None:
        return symmetric
    return _connected(nccl)


def _connected(nccl: NcclGroup) -> NcclGroup:
    """Run a collective, so that NCCL connects, and return the group.

    NCCL connects at its first collective, which must not happen while a CUDA graph is captured.
    """
    nccl.all_reduce(torch.zeros(1, device=nccl.device))
    return nccl


def _largest_bytes(config: EngineConfig) -> int:
    """Return the size in bytes of the largest tensor in a collective: a step's hidden states or its logits.

    Logits are not exchanged where each rank has the whole vocabulary.
    """
    scheduler, vocab_size = config.scheduler, local_model(config).vocab_size
    hidden = scheduler.max_num_batched_tokens * config.model.hidden_size
    logits = max(_LOGITS_ROWS, scheduler.max_num_seqs) * vocab_size if vocab_size < config.model.vocab_size else 0
    return max(hidden, logits) * config.model.dtype.itemsize
