"""Tracks the slots of host memory: which block hash each slot has, and which slots may be given to another hash."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class Slots:
    """Assigns `count` slots to block hashes. If none is free, the least recently used unpinned slot is reassigned.

    Methods take many hashes or slots at once, as a long prefix has thousands.

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

    def use(self, hashes: Sequence[bytes]) -> list[int | None]:
        """Mark the slots with these hashes as the most recently used ones, the last hash's as the newest.

        Return the slot of each hash, None if no slot has the hash.
        """
        found = [*map(self._slots.get, hashes)]
        for block_hash, slot in zip(hashes, found, strict=True):
            if slot is not None:
                self._slots.move_to_end(block_hash)
        return found

    def take(self, hashes: Sequence[bytes]) -> list[int]:
        """Assign slots to hashes that are new and distinct, and return the slots.

        If there are fewer slots that are not pinned, only the first hashes get one.
        """
        slots = [self._free.pop() for _ in range(min(len(hashes), len(self._free)))]
        if len(slots) < len(hashes):
            unpinned = (known for known, slot in self._slots.items() if slot not in self._pins)
            slots += map(self._slots.pop, [*islice(unpinned, len(hashes) - len(slots))])
        self._slots.update(zip(hashes, slots, strict=False))
        return slots

    def pin(self, slots: Iterable[int]) -> None:
        """Keep slots from being given to other hashes until `unpin` was called for each as often as `pin`."""
        self._pins.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        pins = self._pins
        for slot in slots:
            if pins[slot] > 1:
                pins[slot] -= 1
                continue
            pins.pop(slot)  # quicker than Counter.__delitem__
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
