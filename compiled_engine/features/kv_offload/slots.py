"""The slots of host memory: the block hash of each slot, and whether the slot may be given to another block."""

from __future__ import annotations

from collections import Counter, OrderedDict


class Slots:
    """A table of `count` slots. The least recently used slot that is not pinned is given away."""

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
        """Return the slot with this hash, now the most recently used one; None if there is none."""
        if block_hash not in self._slots:
            return None
        self._slots.move_to_end(block_hash)
        return self._slots[block_hash]

    def take(self, block_hash: bytes) -> int | None:
        """Assign a slot to a new hash and return the slot; None if all slots are pinned."""
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
        """Keep a slot from being given to another block until `unpin` was called as often as `pin`."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._dropped:
                self._dropped.remove(slot)
                self._free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        """Forget the contents under this hash, if there are any."""
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
