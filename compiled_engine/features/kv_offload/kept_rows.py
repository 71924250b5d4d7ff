"""Tracks rows of one kind: which rows have copies in host memory, and which are still to be copied there.

A row is a block of the KV cache, or a snapshot of recurrent states. Both are found by the hash of the block that ends
there. A row is registered while the step that writes its contents is being planned. It may be copied to a slot of host
memory once that step has been processed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from compiled_engine.features.kv_offload.extras import Copies
from compiled_engine.features.kv_offload.kept_files import KeptFiles
from compiled_engine.features.kv_offload.slots import Slots


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

    def is_arriving(self, block_hash: bytes) -> bool:
        return block_hash in self._arriving

    # Copies to host memory

    def registered(self, row: int, block_hash: bytes, step: int) -> None:
        """Record a row whose contents `step` writes.

        The row can be copied after that step, unless a slot has the hash already.
        """
        if self.slots.use(block_hash) is None:
            self._unsaved[row] = block_hash, step

    def evicted(self, row: int) -> int:
        """Record that a row is reused for other contents.

        Return the number of the save that copied it last, 0 for none.
        """
        self._unsaved.pop(row, None)
        return self._leaving.pop(row, 0)

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
        copies = Copies([], [], [])
        for row in rows:
            block_hash, _ = self._unsaved.pop(row)
            if self.slots.use(block_hash) is None and (slot := self.slots.take(block_hash)) is not None:
                copies.slots.append(slot)
                copies.rows.append(row)
                self.slots.pin(slot)  # a slot has one row in a save
                if self._files.begin_write(name := self.name_of(block_hash), self.slots, slot):
                    copies.files.append((slot, name))
        for slot in copies.slots:
            self.slots.unpin(slot)
        self._leaving.update(dict.fromkeys(copies.rows, number))
        self.saved += len(copies.slots)
        return copies

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark the slots and files with these hashes as most recently used, since the rows were used on the device."""
        for block_hash in hashes:
            self.slots.use(block_hash)
            if self._files.are_used and (name := self.name_of(block_hash)) in self._files:
                self._files.use(name)

    # Copies back

    def begin_load(self, hashes: Sequence[bytes]) -> list[tuple[int, str | None]]:
        """Pin a slot for each hash. Return the slots, each with the name of the file that must be read into it.

        The name is None if the slot has the row already. If too few slots are free, only the first hashes get slots.
        """
        known = [self.slots.use(block_hash) for block_hash in hashes]
        for slot in known:
            if slot is not None:
                self.slots.pin(slot)
        found: list[tuple[int, str | None]] = []
        for block_hash, slot in zip(hashes, known, strict=True):
            name = None
            if slot is None:
                if (slot := self.slots.take(block_hash)) is None:
                    break
                self.slots.pin(slot)
                self._files.use(name := self.name_of(block_hash))
            found.append((slot, name))
        for slot in known[len(found) :]:
            if slot is not None:
                self.slots.unpin(slot)
        self._arriving.update(hashes[: len(found)])
        return found

    def end_load(self, block_hash: bytes, slot: int, *, forget: bool) -> None:
        """End the load of a row: unpin its slot.

        forget: the slot does not have the row's contents, so the hash is dropped.
        """
        self._arriving.discard(block_hash)
        if forget:
            self.slots.drop(block_hash)
        self.slots.unpin(slot)

    def clear(self) -> None:
        """Forget all rows, since the prefix cache was emptied, for example because the weights have changed."""
        self.slots.clear()
        self._unsaved.clear()
        self._leaving.clear()
