"""Counters shared by several API processes: each process writes its own row and can read all rows."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

_COLUMNS = 8192
_ROW_BYTES = 8 * _COLUMNS
_IN_MEMORY = Path("/dev/shm")


class SharedFigures:
    """Rows of float64 in an anonymous shared file, one for each API process.

    The argument `own` is the number of this process's row; the attribute `own` is the row. The argument `descriptor` is
    the file's descriptor if another process has created the file; with None, a new file is created. A process writes to
    the row of another process only after that process has ended. All processes must reserve the same columns in the
    same order. A process that replaces another continues the counts in the row of the other.
    """

    def __init__(self, rows: int = 1, own: int = 0, descriptor: int | None = None) -> None:
        self.descriptor = _make_file(rows * _ROW_BYTES) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor)
        memory = memoryview(mmap.mmap(self.descriptor, rows * _ROW_BYTES)).cast("d")
        self._rows = [memory[number * _COLUMNS : (number + 1) * _COLUMNS] for number in range(rows)]
        self.own = self._rows[own]
        self._reserved = 0

    def reserve(self, columns: int) -> int:
        """Reserve this many adjacent columns. Return the number of the first of them."""
        first = self._reserved
        self._reserved += columns
        assert self._reserved <= _COLUMNS
        return first

    def total(self, column: int) -> float:
        """Return the sum of a column over all processes."""
        return sum(row[column] for row in self._rows)

    def totals(self, columns: Sequence[int]) -> list[float]:
        """Return the sums of several columns."""
        return [self.total(column) for column in columns]

    def of_others(self, column: int) -> list[float]:
        """Return a column's values in the rows of all other processes."""
        return [row[column] for row in self._rows if row is not self.own]

    def forget(self, number: int, column: int) -> None:
        """Reset a column to 0 in row `number`, whose process has ended."""
        self._rows[number][column] = 0.0

    def of(self, number: int, column: int) -> float:
        """Return a column's value in row `number`."""
        return self._rows[number][column]


def _make_file(size: int) -> int:
    """Create a file without a name, of `size` zero bytes, if possible in memory. Return its descriptor."""
    descriptor, path = tempfile.mkstemp(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None)
    os.unlink(path)
    os.truncate(descriptor, size)
    return descriptor
