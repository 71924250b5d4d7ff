"""Defines the plain data of weight updates: the version of the weights in outputs, and descriptions of GPU tensors.

A description lets another process of the same host open a tensor's memory by CUDA IPC. The fields are those of
PyTorch's own sharing between processes (`torch.UntypedStorage._share_cuda_`), with bytes in base64.
"""

from __future__ import annotations

from typing import Any

import msgspec

NAME = "weights"
"""Name of the feature on the device, and of its part of an EngineOutput's extras."""


def version_in(extras: dict[str, Any]) -> str | None:
    """Return the version of the weights from the extras of an output, if it has one."""
    version: str | None = extras.get(NAME)
    return version


class SharedStorage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Describes memory on a GPU, which has one or several tensors."""

    handle: str  # of the allocation that contains it
    num_bytes: int
    offset_bytes: int  # within the allocation
    ref_counter: str  # name of the file in which PyTorch counts the users of the memory
    ref_counter_offset: int
    event: str  # recorded when the memory was shared
    event_sync: bool  # whether to wait for the event


class SharedTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tensor in shared memory."""

    storage: int  # index in SharedTensors.storages
    dtype: str
    shape: list[int]
    strides: list[int]  # in elements
    offset: int  # in elements


class SharedTensors(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tensors of a checkpoint in the memory of GPUs."""

    names: list[str]
    tensors: list[SharedTensor]  # by name, in the order of `names`
    storages: list[dict[str, SharedStorage]]  # each by the UUID of the GPU; every rank's GPU needs one
    # Whether the sender reuses the memory before the update is finished; it is then copied when it is received.
    copy: bool = False
