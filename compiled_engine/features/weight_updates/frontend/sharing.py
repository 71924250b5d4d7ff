"""Describe a trainer's tensors on a GPU as plain data, for an engine in another process on the same GPU."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from inspect import signature
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


def shared_by_reductions(name: str, reductions: Mapping[str, Any]) -> SharedTensors:
    """Return the description of one tensor that PyTorch's own sharing between processes describes.

    The engine copies the tensor when it receives it. reductions: by the UUID of each GPU, the result of
    torch.multiprocessing.reductions.reduce_tensor: a function and its arguments. The function is not called. Raises
    ValueError if it is another one than a GPU's tensor has, or if the GPUs' tensors differ in more than their memory.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    fields = [*signature(rebuild_cuda_tensor).parameters]
    tensors, storages = [], {}
    for uuid, (function, arguments) in reductions.items():
        if function is not rebuild_cuda_tensor or len(arguments) != len(fields):
            raise ValueError(f"{name} is shared with {function!r}; allowed: a tensor on a GPU")
        given = dict(zip(fields, arguments, strict=True))
        tensors.append(
            SharedTensor(
                storage=0,
                dtype=str(given["dtype"]).removeprefix("torch."),
                shape=[*given["tensor_size"]],
                strides=[*given["tensor_stride"]],
                offset=given["tensor_offset"],
            )
        )
        storages[uuid] = _storage(
            given["storage_handle"],
            given["storage_size_bytes"],
            given["storage_offset_bytes"],
            given["ref_counter_handle"],
            given["ref_counter_offset"],
            given["event_handle"],
            given["event_sync_required"],
        )
    if not tensors or any(each != tensors[0] for each in tensors):
        raise ValueError(f"{name} has the descriptions {tensors}; allowed: one for each GPU, all alike")
    return SharedTensors(names=[name], tensors=tensors[:1], storages=[storages], copy=True)


def _described(storage: torch.UntypedStorage) -> SharedStorage:
    shared: Any = storage._share_cuda_()
    return _storage(*shared[1:])  # the first item is the device


def _storage(
    handle: bytes,
    num_bytes: int,
    offset_bytes: int,
    ref_counter: bytes,
    ref_counter_offset: int,
    event: bytes,
    event_sync: bool,
) -> SharedStorage:
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
