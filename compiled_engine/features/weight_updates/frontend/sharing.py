"""Describe a trainer's tensors on a GPU as plain data, for an engine in another process on the same GPU."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from compiled_engine.features.weight_updates.extras import SharedStorage, SharedTensor, SharedTensors

if TYPE_CHECKING:
    import torch


def share_tensors(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *, copy: bool = False
) -> SharedTensors:
    """Return descriptions of tensors, with which `update_weights` of an engine in another process opens the tensors.

    weights: tensors on a GPU by the checkpoint's names, with any strides; views of one buffer are shared once. The
    tensors must not change until the update is finished, or with `copy` until the call of `update_weights` has
    returned, since the engine copies them. Raises ValueError for a tensor that is not on a GPU.
    """
    shared = SharedTensors(names=[], tensors=[], storages=[], copy=copy)
    places: dict[int, int] = {}  # by the address of a storage, its index
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if tensor.device.type != "cuda":
            raise ValueError(f"{name} is on {str(tensor.device)!r}; allowed: a GPU")
        storage = tensor.untyped_storage()
        place = places.setdefault(storage.data_ptr(), len(shared.storages))
        if place == len(shared.storages):
            shared.storages.append({_uuid(tensor.device): _described(storage)})
        shared.names.append(name)
        shared.tensors.append(described_tensor(tensor, place))
    return shared


def described_tensor(tensor: torch.Tensor, storage: int) -> SharedTensor:
    """Return the description of a tensor. storage: the index of its memory in SharedTensors.storages."""
    return SharedTensor(
        storage=storage,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        strides=list(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def _described(storage: torch.UntypedStorage) -> SharedStorage:
    shared: Any = storage._share_cuda_()
    _, handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, event_sync = shared
    return SharedStorage(
        handle=_text(handle),
        num_bytes=num_bytes,
        offset_bytes=offset_bytes,
        ref_counter=_text(ref_counter),
        ref_counter_offset=ref_counter_offset,
        event=_text(event),
        event_sync=event_sync,
    )


def _uuid(device: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
