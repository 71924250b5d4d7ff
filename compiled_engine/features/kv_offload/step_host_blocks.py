"""The slots of host memory on a rank, and the copies between them and the KV cache.

A slot has the rank's part of a block, of every layer. Copies are launched in the steps' stream, so they need no event:
a step reads what they have loaded, and later steps overwrite what they have saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.kv_offload.extras import NAME, copies_in
from compiled_engine.rows.staged_writes import upload

# Blocks that are gathered on the device, and copied together.
CHUNK = 64


class StepHostBlocks(StepFeature):
    """Copies blocks before a step. caches: the KV caches [N, ...], in a list whose tensors `allocate` reads anew."""

    name = NAME

    def __init__(self, caches: Sequence[torch.Tensor], num_slots: int) -> None:
        self._caches, self._num_slots = caches, num_slots
        self._host: list[torch.Tensor] = []

    def allocate(self, num_blocks: int) -> None:
        """Allocate the slots: for each cache a tensor [num_slots, ...], pinned if the cache is on a GPU."""
        self._host = [
            torch.empty((self._num_slots, *cache.shape[1:]), dtype=torch.uint8, pin_memory=cache.is_cuda)
            for cache in self._bytes()
        ]

    def begin(self, step: SchedulerOutput) -> None:
        copies = copies_in(step.extras)
        if copies is None:
            return
        for slots, blocks in _chunks([*copies.saves], [*copies.saves.values()]):
            self._save(slots, blocks)
        for blocks, slots in _chunks([*copies.loads], [*copies.loads.values()]):
            self._load(blocks, slots)

    def _save(self, slots: list[int], blocks: list[int]) -> None:
        for cache, host in zip(self._bytes(), self._host, strict=True):
            gathered = cache[upload(np.array(blocks), cache.device)]
            for start, stop in _runs(slots):
                host[slots[start] : slots[start] + stop - start].copy_(gathered[start:stop], non_blocking=True)

    def _load(self, blocks: list[int], slots: list[int]) -> None:
        for cache, host in zip(self._bytes(), self._host, strict=True):
            gathered = torch.empty((len(slots), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
            for start, stop in _runs(slots):
                gathered[start:stop].copy_(host[slots[start] : slots[start] + stop - start], non_blocking=True)
            cache[upload(np.array(blocks), cache.device)] = gathered

    def _bytes(self) -> Iterator[torch.Tensor]:
        """Yield views of the caches as bytes, since few operations have 8-bit floats."""
        return (cache.view(torch.uint8) for cache in self._caches)

    def metrics(self) -> dict[str, int]:
        return {"kv_offload_bytes": sum(each.nbytes for each in self._host)}

    def close(self) -> None:
        self._host.clear()


def _chunks(first: list[int], second: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    for start in range(0, len(first), CHUNK):
        yield first[start : start + CHUNK], second[start : start + CHUNK]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the places of each run of consecutive numbers."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield start, place
            start = place
