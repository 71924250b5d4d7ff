"""How a process becomes one of the ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from compiled_engine.collectives.gloo import GlooGroup
from compiled_engine.collectives.group import Group, StandIn
from compiled_engine.config import EngineConfig

log = logging.getLogger("compiled_engine")

# Rows whose logits are there at once where nothing else says: a chunk of a prompt's.
_LOGITS_ROWS = 256


def connect(config: EngineConfig, rank: int, folder: Path) -> Group:
    """Join the group as `rank`; waits for the other ranks. folder: an empty one, private to them.

    On GPUs that cannot reach each other's memory, and for float16, the collectives are NCCL's.
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return StandIn()
    if config.device.type != "cuda":
        return GlooGroup(rank, size, folder)
    from compiled_engine.collectives.nccl import NcclGroup
    from compiled_engine.collectives.symmetric_memory import SUMMED_DTYPES, SymmetricMemoryGroup

    torch.cuda.set_device(config.device)
    nccl = NcclGroup(rank, size, folder, config.device)
    symmetric: SymmetricMemoryGroup | None = None
    try:
        if config.model.dtype not in SUMMED_DTYPES:
            raise RuntimeError(f"its sums are of {' and '.join(map(str, SUMMED_DTYPES))} alone")
        row_bytes = config.model.hidden_size * config.model.dtype.itemsize
        symmetric = SymmetricMemoryGroup(
            nccl, _largest_bytes(config), row_bytes, config.scheduler.max_num_batched_tokens
        )
    except RuntimeError as error:
        log.warning("rank %d does without symmetric memory, its collectives are NCCL's: %s", rank, error)
    if nccl.least(symmetric is not None) and symmetric is not None:
        return symmetric
    nccl.all_reduce(torch.zeros(1, device=config.device))  # connects, which a capture could not
    return nccl


def _largest_bytes(config: EngineConfig) -> int:
    """Of the tensors that collectives are given: a step's hidden states, or its logits."""
    scheduler = config.scheduler
    hidden = scheduler.max_num_batched_tokens * config.model.hidden_size
    logits = max(_LOGITS_ROWS, scheduler.max_num_seqs) * config.local_model.vocab_size
    return max(hidden, logits) * config.model.dtype.itemsize
