"""Trainers in processes of their own: they share weights on a GPU, or broadcast them over NCCL, when they are told."""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from compiled_engine.features.weight_updates.extras import SharedTensors
from compiled_engine.features.weight_updates.frontend.sharing import share_tensors
from compiled_engine.features.weight_updates.nccl import ID_KEY, NcclCommunicator

TIMEOUT = timedelta(minutes=2)


class UniqueId(ctypes.Structure):
    """The id of a communicator, which vLLM's clients pickle."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Trainer:
    """A trainer's process, which executes commands."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, *command: Any) -> None:
        self._connection.send(command)

    def answer(self) -> Any:
        """Wait for the answer to the last command. Raises RuntimeError if the trainer failed."""
        assert self._connection.poll(TIMEOUT.total_seconds())
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(f"the trainer failed: {answer!r}")
        return answer

    def ask(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def shared(self, *command: Any) -> SharedTensors:
        """Return the descriptions of the tensors that a command shares."""
        return msgspec.msgpack.decode(self.ask(*command), type=SharedTensors)


@contextmanager
def trainer(folder: Path, device: str = "cuda:0") -> Iterator[Trainer]:
    """Start a trainer with the weights of a folder on a GPU."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train, args=(folder, device, there), daemon=True)
    process.start()
    try:
        yield Trainer(here)
        here.send(("end",))
        process.join(60)
    finally:
        process.kill()
        process.join()


def _train(folder: Path, device: str, connection: Connection) -> None:
    torch.cuda.set_device(device)
    told = _Weights(folder, device, connection)
    while True:
        name, *arguments = connection.recv()
        if name == "end":
            return
        try:
            answer = getattr(told, name)(*arguments)
        except Exception as error:
            answer = error
        connection.send(answer)


class _Weights:
    def __init__(self, folder: Path, device: str, connection: Connection) -> None:
        self._device, self._connection = device, connection
        self._tensors = {
            name: tensor.to(device)
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        self._buffer = torch.empty(0)

    def share(self) -> bytes:
        """Share all tensors as they are."""
        return msgspec.msgpack.encode(share_tensors(self._tensors))

    def pack(self, part: int, num_parts: int) -> bytes:
        """Share one of the parts in a buffer that all parts have in turn."""
        parts = [dict([*self._tensors.items()][number::num_parts]) for number in range(num_parts)]
        if not self._buffer.numel():
            most = max(sum(-(-each.nbytes // 256) * 256 for each in part.values()) for part in parts)
            self._buffer = torch.empty(most, dtype=torch.uint8, device=self._device)
        views, begin = {}, 0
        for name, tensor in parts[part].items():
            data = self._buffer[begin : begin + tensor.nbytes]
            views[name] = data.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            begin += -(-tensor.nbytes // 256) * 256
        torch.cuda.synchronize()
        return msgspec.msgpack.encode(share_tensors(views, copy=True))

    def spoil(self) -> None:
        """Overwrite everything that was shared."""
        self._buffer.fill_(255)
        for tensor in self._tensors.values():
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()

    def announced(self) -> tuple[list[str], list[str], list[list[int]]]:
        dtypes = [str(each.dtype).removeprefix("torch.") for each in self._tensors.values()]
        return [*self._tensors], dtypes, [[*each.shape] for each in self._tensors.values()]

    def listen(self, num_ranks: int) -> int:
        """Put a communicator's id into a store as vLLM does, and return the store's port."""
        self._size = num_ranks + 1
        self._store = dist.TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)
        self._id = torch.cuda.nccl.unique_id()
        self._store.set(ID_KEY, pickle.dumps(UniqueId.from_buffer_copy(self._id)))
        return self._store.port

    def join(self) -> None:
        """Join the communicator, once the engine's ranks do."""
        self._communicator = NcclCommunicator(self._id, 0, self._size, torch.device(self._device), TIMEOUT)

    def broadcast(self, packed: bool) -> None:
        flat = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in self._tensors.values()]
        for message in [torch.cat(flat)] if packed else flat:
            self._communicator.broadcast(message)
