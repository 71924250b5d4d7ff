"""Copies rows (KV cache blocks, or snapshots of recurrent states) between a rank's device and slots in host memory.

A slot has the rank's part of a row, of every layer. Copies go through a buffer on the device, so that each copy over
the bus is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from compiled_engine.features.kv_offload.layer_rows import LayerRows
from compiled_engine.process.pinned_memory import PinnedMemory
from compiled_engine.rows.staged_writes import upload

# Bytes of a buffer on the device in which rows are gathered; a row that is larger has more.
STAGING_BYTES = 64 << 20


class HostRows:
    """Copies rows between the device and host memory.

    tensors: a function that returns the tensors of all layers, each [N, ...] with N rows; a tensor that layers share is
    returned once. num_slots: number of rows for which host memory is allocated. staging_bytes: of the buffer on the
    device. `stored` and `loaded` count the rows copied to host memory and back.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[torch.Tensor]],
        num_slots: int,
        device: torch.device,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._tensors, self._num_slots, self._device = tensors, num_slots, device
        self._staging_bytes = staging_bytes
        self._host: PinnedMemory | None = None
        self._layers: LayerRows | None = None
        self.stored = self.loaded = 0
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory."""
        return 0 if self._host is None else self._host.bytes.nbytes

    @property
    def row_bytes(self) -> int:
        return self._staging.shape[-1]

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Launch the copy kernels for row 0, which is copied to itself. See StepFeature.compile_kernels."""
        layers, row = LayerRows(self._tensors()), torch.zeros(1, dtype=torch.int64, device=self._device)
        buffer = torch.empty((1, self._count_bytes()), dtype=torch.uint8, device=self._device)
        layers.gather(row, buffer)
        layers.scatter(row, buffer)

    def allocate_staging(self) -> None:
        row_bytes = self._count_bytes()
        rows = max(1, min(self._num_slots, self._staging_bytes // row_bytes))
        self._staging = torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device)

    def allocate_slots(self) -> None:
        """Allocate host memory. The tensors are not replaced from now on."""
        self._host = PinnedMemory(self._num_slots * self.row_bytes, pinned=self._device.type == "cuda")
        self._layers = LayerRows(self._tensors())

    @property
    def num_at_once(self) -> int:
        """The number of rows that are copied together."""
        return min(len(self._staging), *(len(each) for each in self._tensors() if each.numel()))

    def slot(self, slot: int) -> memoryview:
        """Return a view of the bytes of a slot in host memory."""
        return self._slots[slot].numpy().data

    @torch.inference_mode()
    def copy_out(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Copy each row on the device to its slot, on a GPU in the current stream. slots, rows: of equal length."""
        assert self._layers is not None
        self.stored += len(rows)
        in_host = self._slots
        for part_slots, part_rows in self._divided(slots, rows):
            indices, staging = upload(part_rows, self._device), self._staging[: len(part_rows)]
            self._layers.gather(indices, staging)
            for first, run in _runs(part_slots):
                in_host[first : first + run.stop - run.start].copy_(staging[run], non_blocking=True)

    @torch.inference_mode()
    def copy_in(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Copy each slot to its row on the device, on a GPU in the current stream. slots, rows: of equal length."""
        assert self._layers is not None
        self.loaded += len(rows)
        in_host = self._slots
        for part_slots, part_rows in self._divided(slots, rows):
            indices, staging = upload(part_rows, self._device), self._staging[: len(part_rows)]
            for first, run in _runs(part_slots):
                staging[run].copy_(in_host[first : first + run.stop - run.start], non_blocking=True)
            self._layers.scatter(indices, staging)

    def close(self) -> None:
        """Free the host memory and the staging buffer. No copy may be running."""
        if self._host is not None:
            self._host.close()
        self._host = self._layers = None
        self._tensors, self._staging = tuple, torch.empty(0)

    def _count_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._tensors())

    @property
    def _slots(self) -> torch.Tensor:
        assert self._host is not None
        return self._host.bytes.view(self._num_slots, self.row_bytes)

    def _divided(self, slots: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ascending slots and their rows, in parts that fit the staging buffer."""
        slots_N, rows_N = np.array(slots, np.int64), np.array(rows, np.int64)
        order_N = np.argsort(slots_N)
        for start in range(0, len(order_N), len(self._staging)):
            part = order_N[start : start + len(self._staging)]
            yield slots_N[part], rows_N[part]


def _runs(numbers_N: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield (first number, indices) for each run of consecutive numbers."""
    starts = np.flatnonzero(np.diff(numbers_N, prepend=-2) != 1).tolist()
    for start, stop in pairwise([*starts, len(numbers_N)]):
        yield int(numbers_N[start]), slice(start, stop)
