"""The planning part of KV offload: which slot of host memory has the block of which hash, and what a step copies.

A block that the KV cache evicts is copied to a slot, if its contents are not in one already. A request whose prefix has
blocks in slots gets new blocks of the KV cache for them, and they are copied back. Both belong to the step whose
planning asks for them. On the device they precede everything else of the step, saves before loads, in the order of
steps. An evicted block therefore still has its contents when it is saved, and a block is loaded before it is read.

Exceptions keep this true: a block whose contents the step being planned has yet to write is not saved, and a slot that
the step being planned writes or reads is not given to another block. If steps fail, what they saved is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.messages import RunnerOutput
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.kv_offload.extras import NAME, Copies

COUNTERS = ("kv_offload_saved", "kv_offload_loaded")
GAUGES = ("kv_offload_blocks", "kv_offload_slots")
# Least tokens that are loaded: fewer are computed again about as fast.
LEAST_TOKENS = 256


class HostBlocks(PlanFeature):
    """Plans the copies of an engine with `num_slots` slots; the least recently used one is given away. A BlockStore."""

    def __init__(self, num_slots: int, least_tokens: int = LEAST_TOKENS) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots, self._least_tokens = num_slots, least_tokens
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by hash, the least recently used one first
        self._free = list(range(num_slots - 1, -1, -1))
        # Of the step being planned: slots that it writes, blocks that it loads, hashes whose slots must stay, and
        # hashes of blocks that it, or a step in flight, has yet to write.
        self._saves: dict[int, int] = {}
        self._loads: dict[int, int] = {}
        self._kept: set[bytes] = set()
        self._unwritten: set[bytes] = set()
        self._saved: dict[int, list[bytes]] = {}  # hashes that steps in flight save, by step
        self._counts = dict.fromkeys(COUNTERS, 0)

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Serve the groups: there is one at most. Requests hold no slots."""
        for group in groups:
            group.load_from(self, self._least_tokens)
        return ()

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def keep(self, block_hash: bytes) -> None:
        self._slots.move_to_end(block_hash)
        self._kept.add(block_hash)

    def load(self, block_hash: bytes, block: int) -> None:
        self._loads[block] = self._slots[block_hash]

    def registered(self, request: Request, indices: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._unwritten.update(hashes[index] for index in indices)

    def evicted(self, block: int, block_hash: bytes) -> None:
        """Save the block's contents, unless they are in a slot, are not written yet, or no slot can be given away."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return
        if block_hash in self._unwritten:
            return
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((known for known in self._slots if known not in self._kept), None)
            if oldest is None:
                return
            slot = self._slots.pop(oldest)
        self._slots[block_hash] = slot
        self._saves[slot] = block
        self._kept.add(block_hash)

    def dropped(self, block: int, block_hash: bytes) -> None:
        """Do nothing: a slot with this hash has contents that were written."""

    def cleared(self) -> None:
        """Free all slots, as keys and values may have changed their meaning."""
        self._free += self._slots.values()
        self._slots.clear()
        self._saves.clear()

    def planned(self, step: StepInFlight) -> None:
        if self._saves or self._loads:
            step.output.extras[NAME] = Copies(self._saves, self._loads)
            self._counts["kv_offload_saved"] += len(self._saves)
            self._counts["kv_offload_loaded"] += len(self._loads)
            if self._saves:
                written = set(self._saves)
                self._saved[step.output.step] = [known for known in self._kept if self._slots.get(known) in written]
        self._forget_plan()

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        self._saved.pop(step.output.step, None)

    def failed(self) -> None:
        """Forget what steps in flight, and the step being planned, have saved."""
        lost = [known for known in self._kept if self._slots.get(known) in self._saves]
        for known in (*lost, *(each for of_step in self._saved.values() for each in of_step)):
            if known in self._slots:
                self._free.append(self._slots.pop(known))
        self._saved.clear()
        self._forget_plan()

    def metrics(self) -> dict[str, Any]:
        return {**self._counts, "kv_offload_blocks": len(self._slots), "kv_offload_slots": self.num_slots}

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each slot is free or has one block."""
        slots = sorted([*self._free, *self._slots.values()])
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"of {self.num_slots} slots of host memory these are free or used: {slots}")

    def _forget_plan(self) -> None:
        self._saves, self._loads = {}, {}
        self._kept.clear()
        self._unwritten.clear()
