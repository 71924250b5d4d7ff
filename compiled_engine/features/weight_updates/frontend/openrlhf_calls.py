"""Makes the control calls for the methods of OpenRLHF's worker extension, its class `WorkerWrap`.

OpenRLHF sends one tensor a call, and marks the last one of an update with `empty_cache`. Here the first tensor starts
an update, and the last one finishes it. A call that fails drops the update, so that the next one begins afresh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compiled_engine.features.weight_updates.frontend import update_calls
from compiled_engine.features.weight_updates.frontend.sharing import shared_by_reductions
from compiled_engine.features.weight_updates.frontend.update_calls import Broadcast, Calls

if TYPE_CHECKING:
    from compiled_engine.config import ParallelConfig


def init_process_group(
    parallel: ParallelConfig,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
    use_ray: bool = False,
) -> Calls:
    """Drop an update that was not finished, and join the trainer's group; several engines may be in it.

    group_name has no effect. Raises ValueError for use_ray, and what `update_calls.connect` raises.
    """
    if use_ray:
        raise ValueError("use_ray is True; allowed: False, since the engine's ranks are no actors of the trainer's Ray")
    yield update_calls.CANCEL
    yield update_calls.connect(parallel, master_address, master_port, rank_offset, world_size, backend=backend)


def update_weight(
    parallel: ParallelConfig, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool = False
) -> Calls:
    """Receive a tensor that the trainer broadcasts. dtype: of torch, or its name. empty_cache: it is the last one."""
    dtype_name = str(dtype).removeprefix("torch.")
    yield from _add(Broadcast([name], [dtype_name], [[*shape]], packed=False), parallel, is_last=empty_cache)


def update_weight_cuda_ipc(
    parallel: ParallelConfig,
    name: str,
    dtype: Any,
    shape: Sequence[int],
    ipc_handles: Mapping[str, Any],
    empty_cache: bool = False,
) -> Calls:
    """Copy a tensor that the trainer shares by CUDA IPC. empty_cache: it is the last one.

    ipc_handles: by the UUID of each rank's GPU, the result of torch.multiprocessing.reductions.reduce_tensor. Raises
    ValueError for anything else, or if the tensors have another shape or dtype.
    """
    try:
        shared = shared_by_reductions(name, ipc_handles)
        (tensor,) = shared.tensors
        announced, found = (str(dtype).removeprefix("torch."), [*shape]), (tensor.dtype, tensor.shape)
        if found != announced:
            raise ValueError(f"{name} is announced as {announced}, and shared as {found}")
    except Exception:
        yield update_calls.CANCEL
        raise
    yield from _add(shared, parallel, is_last=empty_cache)


def _add(weights: Any, parallel: ParallelConfig, *, is_last: bool) -> Calls:
    if (yield update_calls.STATE)["received"] is None:
        yield update_calls.START
    try:
        yield from update_calls.received(weights, parallel, in_this_process=False)
        if is_last:
            yield update_calls.finish(None, recompute=True)
    except Exception:
        yield update_calls.CANCEL
        raise
