"""Receive weights that a trainer broadcasts to all ranks, over gloo: on the host, whatever the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)
# Tensors of one message have at most so many bytes, but for the last of them. The sender counts alike.
PACKED_BYTES = 1 << 30

Announced = tuple[str, torch.dtype, Sequence[int]]


class Broadcasts:
    """A process group of a trainer, which is rank 0, and the engine's ranks.

    address, port: of the trainer's store. packed: a message has several tensors. Raises RuntimeError if the trainer
    does not answer.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, *, packed: bool) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=TIMEOUT)
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        self._packed_bytes = PACKED_BYTES if packed else 0

    def receive(self, announced: Sequence[Announced]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the announced tensors, sent by the trainer in this order. Raises RuntimeError if the trainer ends."""
        for message in _messages(announced, self._packed_bytes):
            sizes = [_bytes_of(each) for each in message]
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            self._group.broadcast(data, 0).wait()
            for (name, dtype, shape), part in zip(message, data.split(sizes), strict=True):
                yield name, part.clone().view(dtype).view(*shape)


def _bytes_of(announced: Announced) -> int:
    _, dtype, shape = announced
    return math.prod(shape) * dtype.itemsize


def _messages(announced: Sequence[Announced], most: int) -> Iterator[list[Announced]]:
    """Divide tensors into messages: each but the last ends with the tensor that brings it above `most` bytes."""
    message: list[Announced] = []
    for each in announced:
        message.append(each)
        if sum(map(_bytes_of, message)) > most:
            yield message
            message = []
    if message:
        yield message
