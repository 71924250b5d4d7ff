"""Prefix caching for recurrences: takes, finds and evicts snapshots of recurrent states.

An attention layer keeps keys and values of every token, so any prefix can be reused up to a block border. A recurrence
keeps a single state per request, the one after its newest token. A prefix can therefore only be reused up to a token at
which the state was copied. Such a snapshot is found by the hash of the block that ends there (block_pool.py), which
covers every token before it.

A request takes a snapshot at the end of the last full block of its prompt, for the conversation's next turn or a
repeated prompt. It takes another at the end of its longest prefix with cached blocks: there two prompts diverged, and
more prompts are likely to do so. A step must end at both places, so that the state exists there. A step first copies
snapshots to the rows of its new requests, then computes, then copies the states to be kept. Steps run in the order of
scheduling, so a snapshot can be used from the next step on, and its slot can be given to another prefix immediately.

Another feature may watch the snapshots (see PlaceWatcher) and copy them elsewhere. It fills slots with such copies by
`begin_fill` and `end_fill`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from compiled_engine.engine.block_pool import BlockGroup, leading_hashes
from compiled_engine.engine.cache_resource import FillableResource, PlaceWatcher
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight

NAME = "recurrence"
# Least tokens that a snapshot must save, because each additional end of a step delays the prompt by a step.
LEAST_GAIN = 64


class StateSnapshots(PlanFeature):
    """Plans the snapshots of `num_slots` slots, of which the least recently used one is evicted.

    Implements FillableResource. A request holds no snapshot: its state is copied from one at admission. The slot of the
    snapshot that a request begins with is in NewRequest.extras. SchedulerOutput.extras map request ids to the slots
    that their states are copied to after the step. `least_gain` is the least tokens that a snapshot must save.
    """

    kind = "snapshots"

    def __init__(self, num_slots: int, block_size: int, least_gain: int = LEAST_GAIN) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots, self.block_size, self._least_gain = num_slots, block_size, least_gain
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the least recently used one first
        self._free = list(range(num_slots - 1, -1, -1))
        self._groups: Sequence[BlockGroup] = ()
        # Slots that the step being planned writes, by hash and by request.
        self._unwritten: dict[bytes, int] = {}
        self._saved: dict[str, int] = {}
        self._begun_with: set[bytes] = set()  # snapshots that the step's new requests begin with
        self._filling: dict[int, bytes] = {}  # hashes of slots that another feature fills
        self.watcher: PlaceWatcher | None = None

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether there is a usable snapshot of the prefix whose last block has this hash."""
        return block_hash in self._slots and block_hash not in self._unwritten

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[FillableResource]:
        self._groups = groups
        return (self,)

    def longest_prefix(self, request: Request, most: int) -> int:
        count = most // self.block_size
        hashes = leading_hashes(request, self.block_size, count)
        for index in range(count, 0, -1):
            if hashes[index - 1] in self:
                return index * self.block_size
        return 0

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        return True

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Choose where the request takes snapshots. Mark the snapshot with which it begins as most recently used.

        num_tokens: the request's tokens. num_cached: tokens that the snapshot covers, 0 for no snapshot. Must be called
        before the request takes its blocks, since taking them may evict its cached prefix.
        """
        if num_cached:
            self._slots.move_to_end(self._hash(request, num_cached))
        num_shared = 0
        if not request.computes_every_token:
            num_shared = min(group.longest_prefix(request, num_tokens - 1) for group in self._groups)
        last = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        ends, before = [], num_cached
        for end in (num_shared, last):
            if before + self._least_gain <= end <= last:
                ends.append(end)
                before = end
        request.step_ends = tuple(ends)

    def free(self, request: Request) -> None:
        """Cancel the snapshots that the request has not taken yet."""
        request.step_ends = ()

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        if num_cached := request.num_computed_tokens:
            key = self._hash(request, num_cached)
            extras[NAME] = self._slots[key]
            self._begun_with.add(key)

    def reached_end(self, request: Request, num_tokens: int) -> None:
        """Plan to save the request's state, after `num_tokens` tokens, in a snapshot at the end of the step.

        Nothing is saved if the prefix has a snapshot already, or if the step already writes all slots.
        """
        key = self._hash(request, num_tokens)
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if (slot := self._take_slot(self._unwritten)) is not None:
            self._slots[key] = self._unwritten[key] = self._saved[request.request_id] = slot
            if self.watcher is not None:
                self.watcher.place_taken(slot, key)

    def _take_slot(self, kept: Collection[bytes]) -> int | None:
        """Return a free slot, or the slot of the least recently used snapshot, which is evicted; None if there is none.

        kept: hashes of snapshots that must not be evicted.
        """
        if self._free:
            return self._free.pop()
        oldest = next((known for known in self._slots if known not in kept), None)
        if oldest is None:
            return None
        slot = self._slots.pop(oldest)
        if self.watcher is not None:
            self.watcher.place_evicted(slot)
        return slot

    def begin_fill(self, block_hash: bytes) -> int | None:
        slot = self._take_slot(self._unwritten.keys() | self._begun_with)
        if slot is not None:
            self._filling[slot] = block_hash
        return slot

    def end_fill(self, place: int, *, filled: bool) -> None:
        block_hash = self._filling.pop(place)
        if filled and block_hash not in self._slots:
            self._slots[block_hash] = place
        else:
            self._free.append(place)

    def planned(self, step: StepInFlight) -> None:
        self._begun_with.clear()
        if self._saved:
            step.output.extras[NAME], self._saved = self._saved, {}

    def failed(self) -> None:
        self._begun_with.clear()
        self._saved = {}

    def take_registered(self) -> list[int]:
        """Return the slots that the step being planned writes, and let later steps use their snapshots."""
        registered, self._unwritten = [*self._unwritten.values()], {}
        return registered

    def unregister(self, slots: Iterable[int]) -> None:
        """Free these slots, because their states were not written."""
        gone = set(slots)
        for key in [key for key, slot in self._slots.items() if slot in gone]:
            self._free.append(slot := self._slots.pop(key))
            if self.watcher is not None:
                self.watcher.place_dropped(slot)

    def unregister_all(self) -> None:
        """Free all slots."""
        self.unregister([*self._slots.values()])

    def check_all_free(self) -> None:
        """Do nothing, since requests hold no snapshots."""

    def check_integrity(self, holders: Collection[Request]) -> None:
        slots = sorted([*self._free, *self._slots.values(), *self._filling])
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"of {self.num_slots} slots of snapshots these are free, used or filled: {slots}")

    def _hash(self, request: Request, num_tokens: int) -> bytes:
        count = num_tokens // self.block_size
        return leading_hashes(request, self.block_size, count)[count - 1]
