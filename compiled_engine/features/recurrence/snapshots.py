"""Snapshots of recurrent states: which prefixes have one, where prompts take one, and which gives way to another.

A layer that attends keeps keys and values of every token, so any prefix can be reused up to a block border. A
recurrence keeps one state for each request, which is that after its newest token. So a prefix can be reused only up to
a token at which the state was copied: a snapshot, found by the hash of the block that ends there (block_pool.py), which
covers every token before it.

A request takes a snapshot at the last full block of its prompt, for the conversation's next turn or the same prompt
again, and where the part of its prompt that has cached blocks ends: there two prompts diverged, and more are likely to
do so. A step ends at either place, so that the state exists there. A step first copies snapshots to the rows of its new
requests, then computes, then copies the states to be kept. Steps run in the order in which they were scheduled, so a
snapshot can be used from the next step on, and given to another prefix at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from compiled_engine.engine.block_pool import BlockGroup, leading_hashes
from compiled_engine.engine.cache_resource import FindableResource
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight

NAME = "recurrence"
# Tokens that a snapshot must save: a prompt that is computed in more steps is later by the time of one.
LEAST_GAIN = 64


class StateSnapshots(PlanFeature):
    """Implements FindableResource, though no request holds a snapshot: it is copied when the request is admitted.

    `num_slots` snapshots; the one used least recently is given to another prefix. In the extras: for a new request the
    slot with the state that it begins with, for a step the slots that states are copied to after it, by request.
    """

    def __init__(self, num_slots: int, block_size: int, least_gain: int = LEAST_GAIN) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots, self.block_size, self._least_gain = num_slots, block_size, least_gain
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the one used least recently first
        self._free = list(range(num_slots - 1, -1, -1))
        self._groups: Sequence[BlockGroup] = ()
        # Of the step that is being planned.
        self._unwritten: dict[bytes, int] = {}
        self._saved: dict[str, int] = {}

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[FindableResource]:
        self._groups = groups
        return (self,)

    def longest_prefix(self, request: Request, most: int) -> int:
        count = most // self.block_size
        hashes = leading_hashes(request, self.block_size, count)
        for index in range(count, 0, -1):
            if hashes[index - 1] in self._slots and hashes[index - 1] not in self._unwritten:
                return index * self.block_size
        return 0

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        return True

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Choose where the request takes snapshots. Its blocks are not taken yet: those may hold what others cached."""
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
        """Forget where the request was to take snapshots."""
        request.step_ends = ()

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        if num_cached := request.num_computed_tokens:
            extras[NAME] = self._slots[self._hash(request, num_cached)]

    def reached_end(self, request: Request, num_tokens: int) -> None:
        """Save the state after the step, unless the prefix has a snapshot, or this step needs all slots."""
        key = self._hash(request, num_tokens)
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((known for known in self._slots if known not in self._unwritten), None)
            if oldest is None:
                return
            slot = self._slots.pop(oldest)
        self._slots[key] = self._unwritten[key] = self._saved[request.request_id] = slot

    def planned(self, step: StepInFlight) -> None:
        if self._saved:
            step.output.extras[NAME], self._saved = self._saved, {}

    def failed(self) -> None:
        self._saved = {}

    def take_registered(self) -> list[int]:
        """Return the slots that the step being planned writes to; later steps find them."""
        registered, self._unwritten = [*self._unwritten.values()], {}
        return registered

    def unregister(self, slots: Iterable[int]) -> None:
        """Forget what these slots hold, because it was not written."""
        gone = set(slots)
        for key in [key for key, slot in self._slots.items() if slot in gone]:
            self._free.append(self._slots.pop(key))

    def unregister_all(self) -> None:
        """Forget every snapshot."""
        self.unregister([*self._slots.values()])

    def check_all_free(self) -> None:
        """Requests hold no snapshots."""

    def check_integrity(self, holders: Collection[Request]) -> None:
        slots = sorted([*self._free, *self._slots.values()])
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"of {self.num_slots} slots of snapshots these are free or used: {slots}")

    def _hash(self, request: Request, num_tokens: int) -> bytes:
        count = num_tokens // self.block_size
        return leading_hashes(request, self.block_size, count)[count - 1]
