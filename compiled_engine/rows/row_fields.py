"""The state of running requests on the device: declared fields, each with a row for every request that may run.

The host never writes a field itself: it stages changes (staged_writes.py), and one kernel applies them on the device in
the order of the steps. So a step in flight reads the values of its launch. Kernels look fields up by row, and may
advance them; a field keeps its address unless it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.staged_writes import StagedField, StagedWrites

FIRST_CAPACITY = 128  # of a list


@dataclass(frozen=True)
class RowField:
    """Declares what a row has: one value, or an array of `shape`.

    initial: each value where nothing was written yet. A field of single values has it again when a request takes a
    row, see RowFields.start; an array does not: it is written before it is read.
    """

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[int, ...] = ()
    initial: float = 0

    def num_bytes(self, num_rows: int) -> int:
        return num_rows * int(np.prod(self.shape)) * self.dtype.itemsize


class RowFields:
    """Fields by name. A row belongs to one request from `start` to `free`; the owner of the rows calls both."""

    def __init__(self, num_rows: int, device: torch.device | str, triton: bool | None = None):
        """triton: whether to launch kernels, by default on CUDA."""
        self.num_rows, self.device = num_rows, torch.device(device)
        self.triton = self.device.type == "cuda" if triton is None else triton
        self.writes = StagedWrites(self.device, self.triton)
        self._fields: dict[str, StagedField] = {}
        self._arrays: list[StagedField] = []
        self._lists: dict[str, _RowList] = {}

    def declare(self, *fields: RowField) -> None:
        """Allocate fields. Raises ValueError if there is one of the same name."""
        for field in fields:
            if field.name in self:
                raise ValueError(f"a row field must have a name of its own, got {field.name!r} again")
            shape = (self.num_rows, *field.shape)
            self._fields[field.name] = staged = self.writes.field(*shape, dtype=field.dtype, initial=field.initial)
            if field.shape:
                self._arrays.append(staged)
            else:
                self.writes.reset_at_start(staged)

    def declare_list(self, name: str, width: int) -> None:
        """Have a list of any length for each row, int32 [n, width]: rows from `name`_start on, `name`_count many."""
        self.declare(RowField(f"{name}_start"), RowField(f"{name}_count"))
        starts, counts = self._fields[f"{name}_start"], self._fields[f"{name}_count"]
        self._lists[name] = _RowList(self.writes.field(1, FIRST_CAPACITY * width), starts, counts, width)

    def __contains__(self, name: str) -> bool:
        return name in self._fields or name in self._lists

    def __getitem__(self, name: str) -> torch.Tensor:
        """A field's tensor, [num_rows, *shape], or the entries of all rows of a list, [n, width]."""
        return self._lists[name].entries if name in self._lists else self._fields[name].tensor

    def if_declared(self, name: str) -> torch.Tensor | None:
        """The same, or None for a field that is not declared."""
        if name not in self:
            return None
        return self[name]

    def set(self, row: int, **values: float) -> None:
        """Stage single values of a row, by field."""
        self.writes.set_each(self._fields, row, values)

    def write(self, name: str, row: int, values: np.ndarray, offset: int = 0) -> None:
        """Stage a part of a row's array, see StagedField.stage."""
        self._fields[name].stage(row, values, offset)

    def write_list(self, name: str, row: int, entries: np.ndarray) -> None:
        """Stage a row's list, int32 [n, width]; it is empty when a request takes the row."""
        self._lists[name].write(row, entries)

    def lengthen(self, name: str, length: int) -> None:
        """Have arrays of at least `length` values, see StagedField.lengthen."""
        self._fields[name].lengthen(length)

    def start(self, row: int, **values: float) -> None:
        """Give a row to a request: its single values are these, and else initial ones until others are set."""
        self.writes.start(row)
        self.writes.set_each(self._fields, row, values)

    def free(self, row: int) -> None:
        """Forget what the row has on the host."""
        self.writes.forget_row(row, self._arrays)
        for each in self._lists.values():
            each.free(row)


class _RowList:
    """The lists of all rows, one behind the other in memory that grows."""

    def __init__(self, field: StagedField, starts: StagedField, counts: StagedField, width: int):
        self._field, self._starts, self._counts, self._width = field, starts, counts, width
        self._capacity = FIRST_CAPACITY
        self._lists: dict[int, np.ndarray] = {}
        self._end = 0

    @property
    def entries(self) -> torch.Tensor:
        return self._field.tensor.view(-1, self._width)

    def write(self, row: int, entries: np.ndarray) -> None:
        self._lists.pop(row, None)
        if len(entries) == 0:
            self._counts.set(row, 0)
            return
        self._lists[row] = entries
        if self._end + len(entries) <= self._capacity:
            self._place(row)
        else:
            self._place_all()

    def free(self, row: int) -> None:
        self._lists.pop(row, None)

    def _place(self, row: int) -> None:
        entries = self._lists[row]
        self._field.stage(0, entries.reshape(-1), self._end * self._width)
        self._starts.set(row, self._end)
        self._counts.set(row, len(entries))
        self._end += len(entries)

    def _place_all(self) -> None:
        """Leave out the lists of rows that were freed; half of the memory is empty afterwards."""
        self._capacity = max(self._capacity, 2 * sum(map(len, self._lists.values())))
        self._field.lengthen(self._capacity * self._width)
        self._field.forget(0)
        self._end = 0
        for row in self._lists:
            self._place(row)
