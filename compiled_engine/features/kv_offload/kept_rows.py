"""Tracks rows of one kind: which rows have copies in host memory, and which are still to be copied there.

A row is a block of the KV cache, or a snapshot of recurrent states. Both are found by the hash of the block that ends
there. A row is registered while the step that writes its contents is being planned. It may be copied to a slot of host
memory once that step has been processed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from compiled_engine.features.kv_offload.extras import Copies
from compiled_engine.features.kv_offload.kept_files import KeptFiles
from compiled_engine.features.kv_offload.slots import Slots


class RowsToLoad(NamedTuple):
    """Rows of one kind that are being loaded: their hashes, and the slot of each."""

    hashes: Sequence[bytes]
    slots: Sequence[int]
    files: dict[int, str]  # name of the file that is read into a slot, by place in `slots`

    def copies(self, rows: list[int]) -> Copies:
        """Return the copies to make. rows: the row on the device for each slot."""
        return Copies([*self.slots], rows, [(self.slots[place], name) for place, name in self.files.items()])


class KeptRows:
    """Tracks the copies of rows of one kind (BLOCKS or STATES) in `num_slots` slots of host memory.

    suffix: ends the names of the rows' files, after the hash. `saved` and `loaded` count the rows that were copied to
    host memory and back to the device.
    """

    def __init__(self, kind: str, num_slots: int, files: KeptFiles, suffix: str = "") -> None:
        self.kind, self.slots, self.saved, self.loaded = kind, Slots(num_slots), 0, 0
        self._files, self._suffix = files, suffix
        # Registered rows that are not copied yet, the oldest first: hash, and number of the step to wait for.
        self._unsaved: dict[int, tuple[bytes, int]] = {}
        self._leaving: dict[int, int] = {}  # the save that copied a row last, until the row is reused
        self._arriving: set[bytes] = set()  # hashes of rows that are being loaded

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether host memory or a file has the row with this hash."""
        return block_hash in self.slots or (self._files.are_used and self.name_of(block_hash) in self._files)

    def name_of(self, block_hash: bytes) -> str:
        """Return the name of the file of the row with this hash."""
        return block_hash.hex() + self._suffix

    def are_arriving(self, hashes: Iterable[bytes]) -> bool:
        """Return whether any of the rows with these hashes is being loaded."""
        return bool(self._arriving) and not self._arriving.isdisjoint(hashes)

    # Copies to host memory

    def registered(self, rows: Sequence[int], hashes: Sequence[bytes], step: int) -> None:
        """Record rows, one for each hash, whose contents `step` writes.

        A row can be copied after that step, unless a slot has the hash already.
        """
        for row, block_hash, slot in zip(rows, hashes, self.slots.use(hashes), strict=True):
            if slot is None:
                self._unsaved[row] = block_hash, step

    def evicted(self, rows: Sequence[int]) -> int:
        """Record that rows are reused for other contents.

        Return the number of the last save that copied one of them, 0 for none.
        """
        for row in rows:
            self._unsaved.pop(row, None)
        return max((self._leaving.pop(row, 0) for row in rows), default=0)

    def dropped(self, row: int) -> None:
        """Record that the contents of a row were not written, so that the row is not copied."""
        self._unsaved.pop(row, None)

    def written_by(self, step: int) -> list[int]:
        """Return the rows that can be copied now: their contents were written by this step or earlier ones."""
        return [*takewhile(lambda row: self._unsaved[row][1] <= step, self._unsaved)]

    def begin_save(self, rows: Sequence[int], number: int) -> Copies:
        """Assign slots to these rows, and return the copies to make in save `number`.

        Rows whose hash has a slot already, and rows for which no slot is left, are not copied. The copies also name the
        files to which slots must be written.
        """
        hashes = [self._unsaved.pop(row)[0] for row in rows]
        row_of: dict[bytes, int] = {}
        for row, block_hash, slot in zip(rows, hashes, self.slots.use(hashes), strict=True):
            if slot is None:
                row_of.setdefault(block_hash, row)
        slots = self.slots.take([*row_of])
        copies = Copies(slots, [*row_of.values()][: len(slots)], [])
        if self._files.are_used:
            for block_hash, slot in zip(row_of, slots, strict=False):
                if self._files.begin_write(name := self.name_of(block_hash), self.slots, slot):
                    copies.files.append((slot, name))
        self._leaving.update(dict.fromkeys(copies.rows, number))
        self.saved += len(slots)
        return copies

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark the slots and files with these hashes as most recently used, since the rows were used on the device."""
        self.slots.use(hashes)
        if self._files.are_used:
            for name in map(self.name_of, hashes):
                if name in self._files:
                    self._files.use(name)

    # Copies back

    def begin_load(self, hashes: Sequence[bytes]) -> RowsToLoad:
        """Pin a slot for each of the hashes, which are distinct, and return the slots.

        If a slot does not have the row yet, a file is read into it. If too few slots are free, only the first hashes
        get slots.
        """
        known = self.slots.use(hashes)
        self.slots.pin([slot for slot in known if slot is not None])
        lacking = [place for place, slot in enumerate(known) if slot is None]
        taken = self.slots.take([hashes[place] for place in lacking])
        self.slots.pin(taken)
        count = lacking[len(taken)] if len(taken) < len(lacking) else len(hashes)
        self.slots.unpin([slot for slot in known[count:] if slot is not None])
        files = {}
        for place, slot in zip(lacking, taken, strict=False):
            known[place] = slot
            self._files.use(name := self.name_of(hashes[place]))
            files[place] = name
        self._arriving.update(hashes[:count])
        return RowsToLoad(hashes[:count], [slot for slot in known[:count] if slot is not None], files)

    def end_load(self, rows: RowsToLoad, forgotten: Collection[int]) -> None:
        """End a load: unpin its slots.

        forgotten: places in `rows` of slots that do not have the contents of their rows; their hashes are dropped.
        """
        self._arriving.difference_update(rows.hashes)
        for place in forgotten:
            self.slots.drop(rows.hashes[place])
        self.slots.unpin(rows.slots)

    def clear(self) -> None:
        """Forget all rows, since the prefix cache was emptied, for example because the weights have changed."""
        self.slots.clear()
        self._unsaved.clear()
        self._leaving.clear()
