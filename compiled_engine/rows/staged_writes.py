"""Copies tensors between host and device without waiting, and batches the host's writes to fields on the device.

Writes are collected on the host and applied together by one kernel; long writes are copies. On CUDA the kernel reads
the values directly from pinned host memory (unified addressing), so nothing is copied first and the host does not wait.
Method: staged write tensors of vLLM's model runner V2.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

# The host may be one step ahead of the device: with this many buffers, none is written while the device reads it.
NUM_BUFFERS = 4
# Most writes per launch, and their most 4-byte words in total.
MAX_WRITES = 1 << 14
MAX_WORDS = 1 << 16
# Longer writes are copies: there are few buffers, and a launch whose buffer is in use waits for the device.
LONG_WORDS = 1 << 13
WORD = 4


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of values on the device, made in stream order without waiting. `values` may be changed afterwards.

    On CUDA the copy goes through new pinned memory, which PyTorch's allocator does not reuse before the copy is done.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(values, order="C"))
    pinned = torch.empty(values.shape, dtype=torch.from_numpy(np.empty(0, values.dtype)).dtype, pin_memory=True)
    pinned.numpy()[...] = values  # in numpy, since PyTorch would wake all its threads
    return pinned.to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """Start to copy `values` to a new tensor in pinned host memory, and return that tensor without waiting.

    The new tensor has the values once the current stream has executed the copy. A tensor on a CPU is returned itself.
    """
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class StagedWrites:
    """Collects the host's writes to fields; `apply` performs the writes on the device.

    triton: whether a Triton kernel performs the writes; None: on CUDA only. Without the kernel, the fields must be on
    the CPU.
    """

    def __init__(self, device: torch.device, triton: bool | None = None):
        self._device = device
        self._triton = device.type == "cuda" if triton is None else triton
        self._lengths: dict[StagedField, int] = {}
        self._numbers: defaultdict[StagedField, dict[int, float]] = defaultdict(dict)
        self._reset: list[StagedField] = []
        self._started: dict[int, None] = {}
        self._arrays: dict[tuple[StagedField, int, int], np.ndarray] = {}
        self._buffers: list[_Buffer] = []
        self._next = 0

    def field(self, *shape: int, dtype: torch.dtype = torch.int32, initial: float = 0) -> StagedField:
        """Return a new field of this shape on the device, filled with `initial`. The first dimension is rows."""
        return StagedField(self, torch.full(shape, initial, dtype=dtype, device=self._device), initial)

    def lengthen(self, field: StagedField, length: int) -> None:
        """Lengthen the rows of a field to at least `length` values at the next `apply`."""
        self._lengths[field] = max(length, self._lengths.get(field, 0))

    def reset_at_start(self, field: StagedField) -> None:
        """Make `start` reset this field of single values to its initial value."""
        self._reset.append(field)

    def start(self, row: int) -> None:
        """Stage a reset of the row's values in the fields given to `reset_at_start`.

        Values that `set` stages for the row, before or after this call, take precedence.
        """
        self._started[row] = None

    def set(self, field: StagedField, row: int, value: float) -> None:
        self._numbers[field][row] = value

    def set_each(self, fields: Mapping[str, StagedField], row: int, values: Mapping[str, float]) -> None:
        """Stage single values of a row. values: by field name."""
        for name, value in values.items():
            self._numbers[fields[name]][row] = value

    def write(self, field: StagedField, row: int, values: np.ndarray, offset: int) -> None:
        if len(values):
            self._arrays[field, row, offset] = values

    def forget(self, field: StagedField, row: int) -> None:
        """Drop the arrays staged for a row of a field."""
        for key in [key for key in self._arrays if key[:2] == (field, row)]:
            del self._arrays[key]

    def forget_row(self, row: int, arrays: Sequence[StagedField]) -> None:
        """Drop everything staged for a row: single values of all fields, and arrays of the fields `arrays`."""
        self._started.pop(row, None)
        for values in self._numbers.values():
            values.pop(row, None)
        for field in arrays if self._arrays else ():
            self.forget(field, row)

    def discard(self) -> None:
        """Drop all staged writes, after a failed step. Fields are still lengthened at the next `apply`."""
        self._started.clear()
        self._numbers.clear()
        self._arrays.clear()

    def apply(self) -> None:
        """Perform the staged writes on the current stream, after lengthening fields.

        Of two writes to a row of a field that begin at the same element, only the later one is performed. Writes must
        not overlap otherwise, since the kernel performs them in parallel.
        """
        for field, length in self._lengths.items():
            field.lengthen_now(length)
        self._lengths.clear()
        if not self._numbers and not self._arrays and not self._started:
            return
        numbers, arrays = self._numbers, self._arrays
        self._numbers, self._arrays = defaultdict(dict), {}
        if self._started:
            for field in self._reset:
                numbers[field] = dict.fromkeys(self._started, field.initial) | numbers[field]
            self._started = {}
        if self._triton:
            writes = _Writes()
            for field, values in numbers.items():
                writes.add_numbers(field, values)
            for (field, row, offset), array in arrays.items():
                if not writes.add_array(field, field.start(row, offset), array):
                    field.part(row, offset, len(array)).copy_(upload(array, self._device))
            self._launch(writes)
            return
        for field, values in numbers.items():
            field.tensor.numpy()[list(values)] = list(values.values())
        for (field, row, offset), array in arrays.items():
            field.part(row, offset, len(array)).numpy()[:] = array

    def _launch(self, writes: _Writes) -> None:
        """Perform `writes` with the kernel, in several launches if the writes do not fit into one pinned buffer."""
        from compiled_engine.rows.staged_writes_kernel import launch  # Triton is not installed everywhere

        addresses, counts, words = writes.arrays()
        ends = np.cumsum(counts)
        first, start = 0, 0
        while first < len(counts):
            last = min(int(np.searchsorted(ends, start + MAX_WORDS, side="right")), first + MAX_WRITES)
            end = int(ends[last - 1])
            buffer = self._free_buffer()
            headers = buffer.headers.numpy()[: last - first]
            headers[:, 0] = addresses[first:last]
            headers[:, 1] = ends[first:last] - counts[first:last] - start
            headers[:, 2] = counts[first:last]
            buffer.words.numpy()[: end - start] = words[start:end]
            launch(buffer.headers, buffer.words, last - first)
            if buffer.event is not None:
                buffer.event.record()
            first, start = last, end

    def _free_buffer(self) -> _Buffer:
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(_Buffer(on_gpu=self._device.type == "cuda"))
            return self._buffers[-1]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        if buffer.event is not None:
            buffer.event.synchronize()  # the launch was NUM_BUFFERS launches ago, so this rarely waits
        return buffer


class _Writes:
    """Builds the kernel's input: for each write its device address, its number of 4-byte words, and the words."""

    def __init__(self) -> None:
        self._numbers: dict[np.dtype, tuple[list[int], list[float]]] = {}
        self._addresses: list[int] = []
        self._counts: list[int] = []
        self._words: list[np.ndarray] = []

    def add_numbers(self, field: StagedField, values: dict[int, float]) -> None:
        """Add single values of a field. values: by row. Raises ValueError unless the field's dtype has 4 or 8 bytes."""
        dtype = field.numpy_dtype
        if dtype.itemsize % WORD:
            raise ValueError(f"dtype of a field of single values must have 4 or 8 bytes, got {dtype}")
        addresses, numbers = self._numbers.setdefault(dtype, ([], []))
        addresses += [field.address + row * dtype.itemsize for row in values]
        numbers += values.values()

    def add_array(self, field: StagedField, start: int, array: np.ndarray) -> bool:
        """Add values that are written from the field's flat index `start` on. Return whether they were added.

        Arrays of more than LONG_WORDS words, or whose address or size is no multiple of 4 bytes, are not added.
        """
        num_bytes = array.nbytes
        address = field.address + start * array.itemsize
        if num_bytes > LONG_WORDS * WORD or (address | num_bytes) % WORD:
            return False
        self._addresses.append(address)
        self._counts.append(num_bytes // WORD)
        self._words.append(array if array.dtype == np.int32 else np.ascontiguousarray(array).view(np.int32))
        return True

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the addresses (int64), word counts (int64) and words (int32) of all writes, in the same order."""
        for dtype, (addresses, numbers) in self._numbers.items():
            self._addresses += addresses
            self._counts += [dtype.itemsize // WORD] * len(addresses)
            self._words.append(np.array(numbers, dtype).view(np.int32))
        words = np.concatenate(self._words) if self._words else np.empty(0, np.int32)
        return np.array(self._addresses, np.int64), np.array(self._counts, np.int64), words


class StagedField:
    """A tensor on the device whose first dimension is rows, and whose values the host writes by staging them.

    Kernels read `tensor`; it is another tensor after the field was lengthened.
    """

    def __init__(self, writes: StagedWrites, tensor: torch.Tensor, initial: float):
        # Weak, since staged writes refer to fields: a cycle would keep the memory until the next garbage collection.
        self._writes, self.initial = weakref.proxy(writes), initial
        self.numpy_dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        self._put(tensor)

    def _put(self, tensor: torch.Tensor) -> None:
        self.tensor, self.address, self._row_size = tensor, tensor.data_ptr(), tensor.stride(0)

    def set(self, row: int, value: float) -> None:
        """Stage the value of a row, in a field with a single value per row."""
        self._writes.set(self, row, value)

    def stage(self, row: int, values: np.ndarray, offset: int = 0) -> None:
        """Stage values of a row, from its element `offset` on. A negative offset counts from the row's end.

        The array `values` must not change until the writes are applied. Raises ValueError if it does not have the
        field's dtype.
        """
        if values.dtype != self.numpy_dtype:
            raise ValueError(f"values must have the field's dtype {self.numpy_dtype}, got {values.dtype}")
        self._writes.write(self, row, values, offset)

    def lengthen(self, length: int) -> None:
        """Lengthen rows to at least `length` values at the next `apply`.

        A row's present values move to its end, and the field's initial value fills the elements before them.
        """
        self._writes.lengthen(self, length)

    def forget(self, row: int) -> None:
        """Drop the arrays staged for a row of this field."""
        self._writes.forget(self, row)

    def start(self, row: int, offset: int) -> int:
        """Return the flat index, in `tensor`, of a row's element `offset`. A negative offset counts from the end."""
        return row * self._row_size + (offset if offset >= 0 else self._row_size + offset)

    def part(self, row: int, offset: int, count: int) -> torch.Tensor:
        """Return a 1-D view of `count` elements of a row, from its element `offset` on."""
        start = self.start(row, offset)
        return self.tensor.view(-1)[start : start + count]

    def lengthen_now(self, length: int) -> None:
        num_rows, have = self.tensor.shape
        if have < length:
            longer = self.tensor.new_full((num_rows, length), self.initial)
            longer[:, length - have :] = self.tensor
            self._put(longer)


class _Buffer:
    """Pinned memory for the input of one launch, and an event that is recorded after the launch.

    headers: int64 [MAX_WRITES, 3], words: int32 [MAX_WORDS], see `apply_kernel`. PyTorch may reuse pinned memory as
    soon as it is freed, so a buffer's destructor waits for the launch.
    """

    def __init__(self, on_gpu: bool):
        self.headers = torch.empty(MAX_WRITES, 3, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.words = torch.empty(MAX_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None
        if self.event is not None:
            weakref.finalize(self, self.event.synchronize).atexit = False
