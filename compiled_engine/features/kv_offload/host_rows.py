"""Copies rows (KV cache blocks, or snapshots of recurrent states) between a rank's device and slots in host memory.

A slot has the rank's part of a row, of every layer. Copies go through buffers on the device, so that each copy over
the bus is large. While the bus fills or empties one buffer, rows are gathered to another one or scattered from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.features.kv_offload.layer_rows import LayerRows
from compiled_engine.process.pinned_memory import PinnedMemory
from compiled_engine.rows.staged_writes import upload

# Bytes of all buffers on the device together; with rows that are larger, there are two buffers of one row.
BUFFERS_BYTES = 64 << 20
MOST_BUFFERS = 4


@dataclass(frozen=True)
class Part:
    """Some of the rows of a copy."""

    slots: Sequence[int]
    rows: torch.Tensor  # int64 [R], on the device
    buffer: torch.Tensor  # uint8 [R, bytes of a row]


class HostRows:
    """Copies rows between the device and host memory.

    tensors: a function that returns the tensors of all layers, each [N, ...] with N rows; a tensor that layers share is
    returned once. num_slots: number of rows for which host memory is allocated. buffers_bytes: bytes of all buffers
    together. `stored` and `loaded` count the rows copied to host memory and back.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[torch.Tensor]],
        num_slots: int,
        device: torch.device,
        buffers_bytes: int = BUFFERS_BYTES,
    ) -> None:
        self._tensors, self._num_slots, self._device = tensors, num_slots, device
        self._buffers_bytes = buffers_bytes
        self._host: PinnedMemory | None = None
        self.stored = self.loaded = 0
        self._bus = BusStream(device)
        # The buffers [rows, row_bytes] with the end of the last use, in order of use.
        self._buffers: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def nbytes(self) -> int:
        """The bytes of host memory."""
        return 0 if self._host is None else self._host.bytes.nbytes

    @property
    def row_bytes(self) -> int:
        return self._buffers[0][0].shape[-1] if self._buffers else 0

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Launch the copy kernels for row 0, which is copied to itself. See StepFeature.compile_kernels."""
        layers, row = LayerRows(self._tensors()), torch.zeros(1, dtype=torch.int64, device=self._device)
        buffer = torch.empty((1, self._count_bytes()), dtype=torch.uint8, device=self._device)
        layers.gather(row, buffer)
        layers.scatter(row, buffer)

    def allocate_buffers(self) -> None:
        row_bytes = self._count_bytes()
        rows = max(1, min(self._num_slots, self._buffers_bytes // MOST_BUFFERS // row_bytes))
        count = min(MOST_BUFFERS, max(2, self._buffers_bytes // (rows * row_bytes)))
        for _ in range(count):
            self._buffers.append((torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device), None))

    def allocate_slots(self) -> None:
        self._host = PinnedMemory(self._num_slots * self.row_bytes, pinned=self._device.type == "cuda")

    def slot(self, slot: int) -> memoryview:
        """Return a view of the bytes of a slot in host memory."""
        return self._slots[slot].numpy().data

    @torch.inference_mode()
    def copy_out(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Copy each row on the device to its slot. slots, rows: of equal length.

        On a GPU the copies run after the work of the current stream, which waits for them. The call returns when the
        last ones are launched; few are launched ahead, since a full queue of a stream delays launches in others.
        """
        self.stored += len(rows)
        layers = LayerRows(self._tensors())
        for part in self._parts(slots, rows):
            layers.gather(part.rows, part.buffer)
            self._bus.wait_for_current()
            with self._bus.current():
                for run, first in _runs(part.slots):
                    self._slots[first : first + run.stop - run.start].copy_(part.buffer[run], non_blocking=True)
                self._used()
        self._bus.make_current_wait()

    @torch.inference_mode()
    def copy_in(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Copy each slot to its row on the device. For streams and arguments see `copy_out`."""
        self.loaded += len(rows)
        layers = LayerRows(self._tensors())
        self._bus.wait_for_current()
        for part in self._parts(slots, rows):
            with self._bus.current():
                for run, first in _runs(part.slots):
                    part.buffer[run].copy_(self._slots[first : first + run.stop - run.start], non_blocking=True)
            self._bus.make_current_wait()
            layers.scatter(part.rows, part.buffer)
            self._used()

    def close(self) -> None:
        """Free the host memory and the buffers. No copy may be running."""
        if self._host is not None:
            self._host.close()
        self._host = None
        self._tensors = tuple
        self._buffers.clear()

    def _count_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._tensors())

    @property
    def _slots(self) -> torch.Tensor:
        assert self._host is not None
        return self._host.bytes.view(self._num_slots, self.row_bytes)

    def _parts(self, slots: Sequence[int], rows: Sequence[int]) -> Iterator[Part]:
        """Yield the rows in ascending order of their slots, in parts that fit a buffer, each once a buffer is free."""
        pairs = sorted(zip(slots, rows, strict=True))
        ascending = [slot for slot, _ in pairs]
        rows_R = upload(np.array([row for _, row in pairs], np.int64), self._device)
        start = 0
        while start < len(pairs):
            buffer, last_use = self._buffers[0]
            if last_use is not None:
                last_use.synchronize()
            stop = min(start + len(buffer), len(pairs))
            yield Part(ascending[start:stop], rows_R[start:stop], buffer[: stop - start])
            start = stop

    def _used(self) -> None:
        """Make the first buffer the last one; it is free when the work in the current stream has ended."""
        buffer, _ = self._buffers.popleft()
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        self._buffers.append((buffer, event))


class BusStream:
    """A stream for copies between device and host, beside the current stream. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[object]:
        """Make this stream the current one within the context."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def make_current_wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield (indices into `numbers`, first number) for each run of consecutive numbers."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield slice(start, place), numbers[start]
            start = place
