"""Packs tensors into messages, each of which ends with the tensor that brings it above MESSAGE_BYTES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

MESSAGE_BYTES = 1 << 30


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
) -> None:
    message: list[torch.Tensor] = []
    for item in iterator:
        message.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(map(len, message)) > MESSAGE_BYTES:
            group.broadcast(torch.cat(message), src=src)
            message = []
    if message:
        group.broadcast(torch.cat(message), src=src)
