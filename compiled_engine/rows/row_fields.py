"""Holds the state of running requests on the device: fields (tensors) with a row for each request that may run.

The host never writes a field directly. It stages changes (staged_writes.py), which one kernel applies on the device in
stream order, so a step in flight reads the values as of its launch. Kernels read a request's values by its row, and may
change them. A field keeps its address unless it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.staged_writes import StagedField, StagedWrites

FIRST_CAPACITY = 128  # entries of a list


@dataclass(frozen=True)
class RowField:
    """The declaration of a field. Each row of the field holds a single value, or an array of `shape`."""

    name: str
    dtype: torch.dtype = torch.int32
    shape: tuple[int, ...] = ()
    # Value before the first write. Single values are reset to it when a request takes a row, see RowFields.start;
    # arrays are not, since they are written before they are read.
    initial: float = 0

    def num_bytes(self, num_rows: int) -> int:
        return num_rows * int(np.prod(self.shape)) * self.dtype.itemsize


class RowFields:
    """All row fields, by name. The caller assigns rows to requests.

    A row belongs to one request from the caller's `start` until its `free`.
    """

    def __init__(self, num_rows: int, device: torch.device | str, triton: bool | None = None):
        """Create an empty set of fields for `num_rows` rows.

        triton: whether a Triton kernel applies the staged writes; None: on CUDA only.
        """
        self.num_rows, self.device = num_rows, torch.device(device)
        self.triton = self.device.type == "cuda" if triton is None else triton
        self.writes = StagedWrites(self.device, self.triton)
        self._fields: dict[str, StagedField] = {}
        self._arrays: list[StagedField] = []
        self._lists: dict[str, _RowList] = {}

    def declare(self, *fields: RowField) -> None:
        """Allocate fields on the device. Raises ValueError if a name is already taken."""
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
        """Declare a list of variable length per row. An entry has `width` int32 values.

        All lists share one tensor, fields[name]. A row's list begins at the entry fields["<name>_start"][row], and has
        fields["<name>_count"][row] entries.
        """
        self.declare(RowField(f"{name}_start"), RowField(f"{name}_count"))
        starts, counts = self._fields[f"{name}_start"], self._fields[f"{name}_count"]
        self._lists[name] = _RowList(self.writes.field(1, FIRST_CAPACITY * width), starts, counts, width)

    def __contains__(self, name: str) -> bool:
        return name in self._fields or name in self._lists

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field's tensor, [num_rows, *shape], or for a list the entries of all rows, [capacity, width]."""
        return self._lists[name].entries if name in self._lists else self._fields[name].tensor

    def if_declared(self, name: str) -> torch.Tensor | None:
        """Return the tensor as `fields[name]` does, or None if no such field or list is declared."""
        if name not in self:
            return None
        return self[name]

    def set(self, row: int, **values: float) -> None:
        """Stage values of a row's single-valued fields, until `writes.apply` writes them. values: by field name."""
        self.writes.set_each(self._fields, row, values)

    def write(self, name: str, row: int, values: np.ndarray, offset: int = 0) -> None:
        """Stage values of a row's array, from element `offset` on; see StagedField.stage."""
        self._fields[name].stage(row, values, offset)

    def write_list(self, name: str, row: int, entries: np.ndarray) -> None:
        """Stage the new list of a row, int32 [n, width], which replaces the row's list.

        A row's list is empty when a request takes the row.
        """
        self._lists[name].write(row, entries)

    def lengthen(self, name: str, length: int) -> None:
        """Lengthen the arrays of all rows to at least `length` values; see StagedField.lengthen."""
        self._fields[name].lengthen(length)

    def start(self, row: int, **values: float) -> None:
        """Assign a row to a new request: stage `values`, by field name, and initial values for other single values."""
        self.writes.start(row)
        self.writes.set_each(self._fields, row, values)

    def free(self, row: int) -> None:
        """Drop the row's staged writes and its lists, so that another request may take the row.

        Nothing is written to the device.
        """
        self.writes.forget_row(row, self._arrays)
        for each in self._lists.values():
            each.free(row)


class _RowList:
    """The lists of all rows, one after another in one tensor. The tensor grows when the lists do not fit."""

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
        """Write all lists of rows in use again, from the start of the tensor; grow it if they fill more than half."""
        self._capacity = max(self._capacity, 2 * sum(map(len, self._lists.values())))
        self._field.lengthen(self._capacity * self._width)
        self._field.forget(0)
        self._end = 0
        for row in self._lists:
            self._place(row)
