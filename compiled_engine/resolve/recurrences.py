"""Resolve the memory for recurrent states: states of running requests, and snapshots in the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.config import ModelConfig, Recurrences
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_share
from compiled_engine.recurrence.states import with_drafts, without_drafts
from compiled_engine.schema import require_defaults

MIB, GIB = 1 << 20, 1 << 30
# Default bytes by device type, for states of running requests and for snapshots.
STATE_BYTES = {"cuda": 8 * GIB, "cpu": 1 * GIB}
SNAPSHOT_BYTES = {"cuda": 4 * GIB, "cpu": 256 * MIB}
# Small states could have far more snapshots than there are prompts to share.
SNAPSHOTS_PER_REQUEST = 8
# One snapshot where two prompts diverge, and one at the end of each.
LEAST_SNAPSHOTS = 3


def resolve_states(model: ModelConfig, num_drafts: int) -> ModelConfig:
    """Return the model with recurrent states that allow up to `num_drafts` drafts of a request in a step.

    A model without recurrences is returned unchanged.
    """
    if (recurrences := model.recurrences) is None:
        return model
    states = with_drafts(recurrences.states, num_drafts)
    return replace(model, recurrences=replace(recurrences, states=states, num_drafts=num_drafts))


def state_bytes(model: ModelConfig, num_ranks: int) -> int:
    """Return the bytes of a request's recurrent states on each rank; 0 without recurrences."""
    recurrences = local_share(model, num_ranks).recurrences
    return 0 if recurrences is None else recurrences.row_bytes


def snapshot_bytes(model: ModelConfig, num_ranks: int) -> int:
    """Return the bytes of a snapshot on each rank; 0 without recurrences.

    A snapshot is a copy of a request's recurrent states for the prefix cache.
    """
    recurrences = local_share(model, num_ranks).recurrences
    return 0 if recurrences is None else recurrences.snapshot_bytes


def most_requests(request_bytes: int, device: torch.device) -> int | None:
    """Return how many requests' states fit into the default memory for states (STATE_BYTES), at least 1.

    Returns None without recurrences.

    request_bytes: bytes of a request's recurrent states on a rank; 0 without recurrences.
    """
    return max(1, STATE_BYTES[device.type] // request_bytes) if request_bytes else None


def resolve_rows(
    recurrences: Recurrences, request_bytes: int, num_rows: int, num_snapshots: int, reasons: dict[str, str]
) -> Recurrences:
    """Return the recurrences with `num_rows` and `num_snapshots` set. Adds the memory of the rows to `reasons`.

    num_rows: the number of requests whose states are kept at a time. request_bytes: bytes of a request's states.
    """
    told = f"{request_bytes / MIB:.2f} MiB of states each: {num_rows * request_bytes / GIB:.2f} GiB"
    if recurrences.num_drafts:
        without = sum(state.row_bytes for state in without_drafts(recurrences.states, recurrences.num_drafts))
        told += f", {1 - without / recurrences.row_bytes:.1%} of it for drafts"
    reasons["model.recurrences.num_rows"] = told
    return replace(recurrences, num_rows=num_rows, num_snapshots=num_snapshots)


def resolve_snapshots(
    options: EngineOptions, num_bytes: int, max_num_seqs: int, device: torch.device, reasons: dict[str, str]
) -> int:
    """Return the number of snapshots of recurrent states; 0 without recurrences or without prefix caching.

    num_bytes: size of a snapshot on a rank; 0 without recurrences. Raises ValueError if the option num_state_snapshots
    requests snapshots that would not be used.
    """
    given = options.num_state_snapshots
    if not num_bytes or not options.enable_prefix_caching:
        reason = "enable_prefix_caching is False" if num_bytes else "the model has no recurrences"
        if given:
            require_defaults(options, reason, "num_state_snapshots", allowed="0")
        return 0
    if given is not None:
        return given
    budget = SNAPSHOT_BYTES[device.type]
    count = max(LEAST_SNAPSHOTS, min(budget // num_bytes, SNAPSHOTS_PER_REQUEST * max_num_seqs))
    reasons["model.recurrences.num_snapshots"] = (
        f"{num_bytes / MIB:.2f} MiB each: {count * num_bytes / GIB:.2f} GiB of {budget / GIB:g} GiB"
    )
    return count
