"""Opens tensors that another process shares by CUDA IPC, after checking every field of their descriptions."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from compiled_engine.engine.control import ControlError
from compiled_engine.features.weight_updates.extras import SharedStorage, SharedTensor, SharedTensors
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}
# Largest handle in bytes: PyTorch's name the files of an allocation that can grow.
MOST_HANDLE_BYTES = 1 << 16
EVENT_BYTES = 64  # of cudaIpcEventHandle_t
# Names and sizes of the files in which PyTorch counts users of shared memory.
REF_COUNTER, COUNTERS_PER_FILE = re.compile(rb"/torch_\d+_\d+_\d+"), 10_000

OpenStorage = Callable[[SharedStorage], torch.UntypedStorage]
"""Opens the memory of a description whose fields are valid."""


def opened(given: dict[str, Any], uuid: str, open_storage: OpenStorage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of descriptions. Memory that several tensors share is opened once.

    given: SharedTensors as plain data. uuid: UUID of this rank's GPU. Raises ControlError, before anything is opened,
    if a field is invalid, or if a storage has no description for this GPU.
    """
    try:
        shared = msgspec.convert(given, SharedTensors)
    except msgspec.ValidationError as error:
        raise ControlError(f"the description of shared tensors is invalid: {error}") from error
    if len(shared.names) != len(shared.tensors):
        raise ControlError(f"names has {len(shared.names)} items, and tensors {len(shared.tensors)}; allowed: as many")
    storages = [_of_gpu(each, uuid) for each in shared.storages]
    for place, storage in enumerate(storages):
        _check_storage(storage, f"storages[{place}]")
    for name, tensor in zip(shared.names, shared.tensors, strict=True):
        _check_tensor(tensor, storages, name)
    memory = [open_storage(each) for each in storages]
    for name, tensor in zip(shared.names, shared.tensors, strict=True):
        held = memory[tensor.storage]
        view = torch.empty(0, dtype=DTYPES[tensor.dtype], device=held.device)
        yield name, view.set_(held, tensor.offset, tensor.shape, tensor.strides)


def open_on(device: torch.device) -> OpenStorage:
    """Return the function that opens memory on a GPU, as PyTorch does between its own processes."""

    def open_storage(shared: SharedStorage) -> torch.UntypedStorage:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        try:
            storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
                *(index, _bytes(shared.handle), shared.num_bytes, shared.offset_bytes),
                *(_bytes(shared.ref_counter), shared.ref_counter_offset, _bytes(shared.event), shared.event_sync),
            )
        except RuntimeError as error:
            raise ControlError(f"memory of the sender cannot be opened by CUDA IPC: {error}") from error
        return storage

    return open_storage


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU. Raises ControlError for another device."""
    if device.type != "cuda":
        raise ControlError(f"CUDA IPC shares memory of a GPU, but the device is {str(device)!r}")
    return str(torch.cuda.get_device_properties(device).uuid)


def _of_gpu(storages: dict[str, SharedStorage], uuid: str) -> SharedStorage:
    if uuid not in storages:
        raise ControlError(
            f"the GPU of this rank, {uuid}, cannot open memory of {', '.join(storages) or 'no GPU'}; "
            "the sender must share the tensors on each rank's GPU"
        )
    return storages[uuid]


def _check_storage(storage: SharedStorage, name: str) -> None:
    """Raise ControlError if a field is out of its bounds."""
    _check_range(f"{name}.num_bytes", storage.num_bytes, 1, 1 << 48)
    _check_range(f"{name}.offset_bytes", storage.offset_bytes, 0, 1 << 48)
    _check_range(f"{name}.ref_counter_offset", storage.ref_counter_offset, 0, COUNTERS_PER_FILE - 1)
    _check_range(f"the bytes of {name}.handle", len(_bytes(storage.handle)), 1, MOST_HANDLE_BYTES)
    least = EVENT_BYTES if storage.event_sync else 0
    _check_range(f"the bytes of {name}.event", len(_bytes(storage.event)), least, EVENT_BYTES)
    if not REF_COUNTER.fullmatch(_bytes(storage.ref_counter)):
        raise ControlError(f"{name}.ref_counter is {storage.ref_counter!r}; allowed: a name of PyTorch's in base64")


def _check_tensor(tensor: SharedTensor, storages: list[SharedStorage], name: str) -> None:
    """Raise ControlError unless the tensor is within its storage."""
    if tensor.dtype not in DTYPES:
        raise ControlError(f"dtype of {name} is {tensor.dtype!r}; allowed: {', '.join(DTYPES)}")
    _check_range(f"storage of {name}", tensor.storage, 0, len(storages) - 1)
    if len(tensor.shape) != len(tensor.strides) or min((*tensor.shape, *tensor.strides, 0)) < 0:
        raise ControlError(f"{name} has shape {tensor.shape} and strides {tensor.strides}; allowed: as many, from 0")
    extent = 0
    if 0 not in tensor.shape:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    most = storages[tensor.storage].num_bytes // DTYPES[tensor.dtype].itemsize
    _check_range(f"offset of {name}", tensor.offset, 0, most)
    _check_range(f"end of {name} in its storage", tensor.offset + extent, 0, most)


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ControlError(f"{name} is {value}; allowed: {least} to {most}")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ControlError(f"{text[:20]!r} is not base64: {error}") from error
