"""Functions that tests have called on every rank of an engine."""

from __future__ import annotations

import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from compiled_engine.features.rank_calls.step_rank_calls import Rank


def describe(rank: Rank, word: str, *, times: int = 1) -> list[Any]:
    return [rank.index, rank.num_ranks, str(rank.device), word * times]


def num_elements(rank: Rank) -> int:
    return sum(tensor.numel() for tensor in rank.tensors.values())


def count(rank: Rank) -> int:
    """Return how often this function was called on the rank."""
    rank.kept["count"] = rank.kept.get("count", 0) + 1
    return int(rank.kept["count"])


def load(rank: Rank, folder: str) -> int:
    return rank.load_weights(load_file(Path(folder) / "model.safetensors").items())


def load_on_one(rank: Rank, folder: str) -> None:
    """Add the weights on the first rank, and fail on the others."""
    if rank.index:
        raise ValueError("no weights here")
    load(rank, folder)


def receive(rank: Rank, memory: str, tensors: list[tuple[str, str, list[int], int]]) -> int:
    """Add tensors in shared memory: each has a name, a dtype, a shape, and its first byte."""
    shared = SharedMemory(memory)
    data = torch.frombuffer(shared.buf, dtype=torch.uint8).clone()  # the sender frees the memory afterwards
    shared.close()
    weights = []
    for name, dtype_name, shape, begin in tensors:
        dtype = getattr(torch, dtype_name)
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        weights.append((name, data[begin:end].view(dtype).view(shape)))
    return rank.load_weights(weights)


def a_tensor(rank: Rank) -> torch.Tensor:
    return torch.zeros(2)


def wait(rank: Rank, seconds: float) -> str:
    time.sleep(seconds)
    return "waited"
