"""Tracks the files of KV offload: which files are being written, and which must be removed.

A file is a copy of a row (see kept_rows.py). This module only plans; the ranks read and write the files. Without a
FileIndex there are no files. Once the prefix cache was emptied, files are neither read nor written, as the weights may
not be those of the checkpoint any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.features.kv_offload.file_index import FileIndex
from compiled_engine.features.kv_offload.slots import Slots


@dataclass(eq=False, slots=True)
class Write:
    """A write of a slot to a file that has begun. Each rank writes its own part."""

    slots: Slots
    slot: int
    is_there: bool = True  # no rank has failed so far
    num_ranks: int = 0  # ranks that have finished


class KeptFiles:
    """Tracks the files of an engine by name.

    `are_used` says whether files are read and written. `written` counts the files that were written, and `errors` those
    that could not be written or read. `index` is None for an engine without files.
    """

    def __init__(self, index: FileIndex | None) -> None:
        self._index, self.are_used = index, index is not None
        self._writes: dict[str, Write] = {}
        self._to_remove: list[str] = []
        self.written = self.errors = 0

    def __len__(self) -> int:
        return 0 if self._index is None else len(self._index)

    def __contains__(self, name: str) -> bool:
        return self._index is not None and self.are_used and name in self._index

    @property
    def num_writing(self) -> int:
        """The number of files that are being written."""
        return len(self._writes)

    def use(self, name: str) -> None:
        """Make a file the most recently used one."""
        assert self._index is not None
        self._index.use(name)

    def begin_write(self, name: str, slots: Slots, slot: int) -> bool:
        """Begin to write a slot to the file `name`. Return whether a write has begun.

        No write begins if files are not used, or if the file exists or is being written. Otherwise the slot stays
        pinned until all ranks have finished writing.
        """
        if self._index is None or not self.are_used or name in self._index or name in self._writes:
            return False
        self._to_remove += self._index.add(name)
        self._writes[name] = Write(slots, slot)
        slots.pin([slot])
        return True

    def end_write(self, name: str, is_there: bool, num_ranks: int) -> None:
        """Record that one of `num_ranks` ranks has finished writing a file. is_there: the rank has written it.

        After the last rank, the slot is unpinned. If a rank has failed, the file is dropped, see `lose`.
        """
        write = self._writes[name]
        write.is_there &= is_there
        write.num_ranks += 1
        if write.num_ranks == num_ranks:
            del self._writes[name]
            write.slots.unpin([write.slot])
            self.written += write.is_there
            if not write.is_there:
                self.lose(name)

    def lose(self, name: str) -> None:
        """Drop a file that a rank could not write or read, count an error, and mark the file for removal."""
        assert self._index is not None
        self.errors += 1
        self._index.drop(name)
        self._to_remove.append(name)  # other ranks may have it

    def take_removed(self) -> list[str]:
        """Return the names of the files to remove, and clear the list.

        Files that are being written again are left out.
        """
        removed, self._to_remove = self._to_remove, []
        return [name for name in removed if name not in self._writes]

    def stop(self) -> None:
        """Stop reading and writing files."""
        self.are_used = False

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
