"""What a replica's prefix cache is likely to hold, as far as it can be told from what was sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixHistory:
    """The hashes of the `capacity` blocks that were sent last; a prefix cache evicts in nearly the same order.

    Whoever asks again for blocks makes them the newest, the first of a sequence above all: without that one the others
    are not found.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many of a sequence's first blocks are there."""
        known = self._hashes
        return next((index for index, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """The blocks of a sequence were sent there."""
        known = self._hashes
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()
