"""Tracks the slots of host memory: which block hash each slot has, and which slots may be given to another hash."""

from __future__ import annotations

from collections import Counter, OrderedDict


class Slots:
    """Assigns `count` slots to block hashes. If none is free, the least recently used unpinned slot is reassigned.

    Raises ValueError if `count` is less than 1.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"num_slots must be at least 1, got {count}")
        self.count = count
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by hash, the least recently used one first
        self._free = list(range(count - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._dropped: set[int] = set()  # pinned slots whose contents were forgotten

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def use(self, block_hash: bytes) -> int | None:
        """Mark the slot with this hash as the most recently used one. Return it, or None if no slot has the hash."""
        if block_hash not in self._slots:
            return None
        self._slots.move_to_end(block_hash)
        return self._slots[block_hash]

    def take(self, block_hash: bytes) -> int | None:
        """Assign a slot to a new hash. Return the slot, or None if all slots are pinned."""
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((known for known, slot in self._slots.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            slot = self._slots.pop(oldest)
        self._slots[block_hash] = slot
        return slot

    def pin(self, slot: int) -> None:
        """Keep a slot from being given to another hash until `unpin` was called as often as `pin`."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._dropped:
                self._dropped.remove(slot)
                self._free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        """Forget this hash. If a slot has the hash, the slot becomes free once it is not pinned."""
        if (slot := self._slots.pop(block_hash, None)) is None:
            return
        if slot in self._pins:
            self._dropped.add(slot)
        else:
            self._free.append(slot)

    def clear(self) -> None:
        for block_hash in [*self._slots]:
            self.drop(block_hash)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each slot is free, has a hash, or is pinned after its hash was dropped."""
        slots = sorted([*self._slots.values(), *self._free, *self._dropped])
        if slots != [*range(self.count)] or not self._dropped <= {*self._pins}:
            raise RuntimeError(f"slots of host memory are inconsistent: {self._slots}, free {self._free}")
