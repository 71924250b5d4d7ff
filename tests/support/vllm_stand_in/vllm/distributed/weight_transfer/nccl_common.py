"""The trainer's end of a weight transfer, over gloo in place of NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=2)


class Communicator:
    """A group whose rank 0 is this process. group: has the attributes that TRL's client clears."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)
        self.group = SimpleNamespace(store=store, socket=None)
        self._gloo: Any = dist.ProcessGroupGloo(store, 0, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._gloo.broadcast(tensor, src).wait()


def trainer_init(init_info: Mapping[str, Any]) -> Communicator:
    assert init_info["rank_offset"] == 1
    return Communicator(init_info["master_address"], init_info["master_port"], init_info["world_size"])
