"""Receives weights that a trainer broadcasts to all ranks: over gloo on the host, whatever the device, or over NCCL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from compiled_engine.engine.control import ControlError
from compiled_engine.features.weight_updates.nccl import ID_KEY, NcclCommunicator, unique_id_in

TIMEOUT = timedelta(minutes=5)
# A message ends with the tensor that brings it above this number of bytes. The sender divides in the same way.
PACKED_BYTES = 1 << 30
# Memory of a GPU that is left to steps. Received tensors that do not fit beside it are kept on the host.
LEFT_BYTES = 2 << 30
GLOO, NCCL = BACKENDS = ("gloo", "nccl")

Announced = tuple[str, torch.dtype, Sequence[int]]
Receive = Callable[[int], torch.Tensor]
"""Returns the next message, uint8 [n], of a number of bytes n."""


class Broadcasts:
    """Receives the messages of a trainer, which is rank 0 of a group with the engine's ranks.

    receive: see `over_gloo` and `over_nccl`. packed: whether a message has several tensors.
    """

    def __init__(self, receive: Receive, *, packed: bool) -> None:
        self._receive, self._packed = receive, packed

    def receive(self, announced: Sequence[Announced], packed: bool | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the announced tensors, sent by the trainer in this order. Raises RuntimeError if the trainer ends.

        packed: overrides `packed` of the constructor unless it is None.
        """
        most = PACKED_BYTES if (self._packed if packed is None else packed) else 0
        for message in _messages(announced, most):
            sizes = [_bytes_of(each) for each in message]
            data = self._receive(sum(sizes))
            for (name, dtype, shape), part in zip(message, data.split(sizes), strict=True):
                yield name, kept_copy(part).view(dtype).view(*shape)


def over_gloo(address: str, port: int, rank: int, world_size: int) -> Receive:
    """Join the gloo process group of a trainer. Return a function that receives its messages on the host.

    address, port: address of the trainer's store. rank: of this process in the group. Raises RuntimeError if the
    trainer does not answer.
    """
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=TIMEOUT)
    group: Any = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)

    def receive(num_bytes: int) -> torch.Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8)
        group.broadcast(data, 0).wait()
        return data

    return receive


def over_nccl(address: str, port: int, rank: int, world_size: int, device: torch.device) -> Receive:
    """Join the NCCL communicator of a trainer, see nccl.py. Return a function that receives its messages on the device.

    address, port: address of the trainer's store. rank: of this process in the communicator. Raises ControlError for
    another device than a GPU, and RuntimeError or ValueError if the trainer does not answer as it should.
    """
    if device.type != "cuda":
        raise ControlError(f"NCCL sends between GPUs, but the device is {str(device)!r}; allowed: gloo")
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=TIMEOUT)
    communicator = NcclCommunicator(unique_id_in(store.get(ID_KEY)), rank, world_size, device, TIMEOUT)

    def receive(num_bytes: int) -> torch.Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if num_bytes:
            communicator.broadcast(data)
        return data

    return receive


def kept_copy(part: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of data: on its device, or on the host if a GPU has too little memory for it."""
    if part.is_cuda:
        free, _ = torch.cuda.mem_get_info(part.device)
        free += torch.cuda.memory_reserved(part.device) - torch.cuda.memory_allocated(part.device)
        if free < part.nbytes + LEFT_BYTES:
            return part.cpu().contiguous()
    return part.clone(memory_format=torch.contiguous_format)


def _bytes_of(announced: Announced) -> int:
    _, dtype, shape = announced
    return math.prod(shape) * dtype.itemsize


def _messages(announced: Sequence[Announced], most: int) -> Iterator[list[Announced]]:
    """Yield the tensors of each message.

    Each message but the last ends with the tensor that brings it above `most` bytes.
    """
    message: list[Announced] = []
    for each in announced:
        message.append(each)
        if sum(map(_bytes_of, message)) > most:
            yield message
            message = []
    if message:
        yield message
