"""Writes of any length to memory on the device, collected on the host and applied together by one kernel.

On CUDA the kernel reads them where they were written, in pinned host memory (unified addressing), so nothing is copied
and nothing waits. The method is that of vLLM's model runner V2 (its staged write tensors).
"""

from __future__ import annotations

import numpy as np
import torch

# The host may be one step ahead of the device: with this many buffers none is written while it is read.
NUM_BUFFERS = 4
CAPACITY = 1 << 16
HEADER = 3  # of each write: where it goes, where its values are, how many


class StagedWrites:
    """`memory`: int32 [size] on the device; fields are taken from it one after the other by `field`."""

    def __init__(self, size: int, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.memory = torch.zeros(size + 32 * 16, dtype=torch.int32, device=device)
        self._end = 0
        self._writes: list[tuple[int, np.ndarray]] = []
        self._buffers = [_Buffer(CAPACITY) for _ in range(NUM_BUFFERS)] if self._on_gpu else []
        self._next = 0

    def field(self, *shape: int) -> StagedField:
        """The next free part of the memory, aligned to 128 bytes. Raises ValueError if too little is left."""
        size = int(np.prod(shape))
        start, self._end = self._end, self._end + -(-size // 32) * 32
        if start + size > len(self.memory):
            raise ValueError(f"a field of {size} elements does not fit into the {len(self.memory) - start} left")
        return StagedField(self, start, self.memory[start : start + size].view(*shape))

    def stage(self, start: int, values: np.ndarray) -> None:
        """Write int32 `values` to memory[start:] with the next `apply`. The array must not change until then."""
        while len(values) > CAPACITY // 2:
            self._writes.append((start, values[: CAPACITY // 2]))
            start, values = start + CAPACITY // 2, values[CAPACITY // 2 :]
        if len(values):
            self._writes.append((start, values))

    def discard(self) -> None:
        """Forget what is staged: the step that it was for has failed."""
        self._writes = []

    def apply(self) -> None:
        """Make the staged writes, on the current stream; of two that start at the same place the later one alone."""
        if not self._writes:
            return
        writes, self._writes = _without_overwritten(self._writes), []
        if not self._on_gpu:
            memory = self.memory.numpy()
            for start, values in writes:
                memory[start : start + len(values)] = values
            return
        while writes:
            writes = self._launch(writes)

    def _launch(self, writes: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
        """One kernel for as many writes as fit into a buffer; returns the others."""
        from compiled_engine.runner.staged_writes_kernel import launch

        count, used = 0, 0
        while count < len(writes) and used + HEADER + len(writes[count][1]) <= CAPACITY:
            used += HEADER + len(writes[count][1])
            count += 1
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer.event.synchronize()  # of a launch NUM_BUFFERS ago: done long since
        headers: list[int] = []
        position = HEADER * count
        for start, values in writes[:count]:
            headers += (start, position, len(values))
            position += len(values)
        buffer.array[: len(headers)] = headers
        np.concatenate([values for _, values in writes[:count]], out=buffer.array[len(headers) : position])
        launch(self.memory, buffer.tensor, count)
        buffer.event.record()
        return writes[count:]


class StagedField:
    """A part of the memory; `tensor` is what kernels read."""

    def __init__(self, writes: StagedWrites, start: int, tensor: torch.Tensor):
        self._writes, self._start, self.tensor = writes, start, tensor
        self._row_size = tensor[0].numel() if tensor.dim() > 1 else 1

    def stage(self, row: int, values: np.ndarray, offset: int = 0) -> None:
        """Write int32 `values` from element `offset` of a row on."""
        self._writes.stage(self._start + row * self._row_size + offset, values)

    def stage_one(self, row: int, value: int) -> None:
        self.stage(row, np.array([value], np.int32))


class _Buffer:
    def __init__(self, size: int):
        self.tensor = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=True)
        self.array = self.tensor.numpy()
        self.event = torch.cuda.Event()


def _without_overwritten(writes: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """One kernel makes all writes at once, so of several that start at the same place only the last is kept.

    Other overlaps do not occur: a field's rows are written from a fixed place on, or are appended to.
    """
    return list({start: (start, values) for start, values in writes}.values())
