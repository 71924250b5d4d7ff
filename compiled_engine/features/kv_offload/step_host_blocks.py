"""The host memory of a rank, and the copies between it and the KV cache.

A row of host memory has the rank's part of a block, of every layer. On a GPU, copies run on a stream of their own, one
after the other and after the steps that were submitted before, so steps do not wait for them. A thread launches them,
since a long prefix takes more launches than a stream's queue holds. On a CPU they are made at once. Other threads read
and write files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, takewhile
from pathlib import Path

import numpy as np
import torch

from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.kv_offload.block_files import BlockFiles
from compiled_engine.features.kv_offload.extras import ARRIVED, LOAD, NAME, OPEN_FILES, SAVE, Arrived, copies_before
from compiled_engine.features.kv_offload.host_memory import HostMemory
from compiled_engine.process.progress import Progress
from compiled_engine.rows.staged_writes import upload

# Bytes of a buffer on the device in which blocks are gathered, so that each copy over the bus is large.
STAGING_BYTES = 64 << 20
# Threads that read files: one alone is slower than the bus.
NUM_READERS = 8


Launched = Future[torch.cuda.Event | None]
"""The event after copies, once they are launched; None on a CPU."""


@dataclass(eq=False)
class PendingLoad:
    """A load that has not ended."""

    number: int
    slots: list[int]
    blocks: list[int]
    reads: dict[int, Future[bool]]  # of files, by slot
    copies: Launched | None = None


class StepHostBlocks(StepFeature):
    """Copies blocks. caches: the KV caches [N, ...], in a list whose tensors `allocate` reads anew. rank: its index."""

    name = NAME
    calls = (SAVE, LOAD, ARRIVED, OPEN_FILES)

    def __init__(self, caches: Sequence[torch.Tensor], num_slots: int, device: torch.device, rank: int) -> None:
        self._caches, self._num_slots, self._device, self._rank = caches, num_slots, device, rank
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._launcher = None if self._stream is None else ThreadPoolExecutor(1)
        self._readers, self._writer = ThreadPoolExecutor(NUM_READERS), ThreadPoolExecutor(1)
        self._saves: deque[tuple[int, Launched]] = deque()
        self._loads: list[PendingLoad] = []
        self._writes: list[tuple[str, Future[bool]]] = []
        self._files: BlockFiles | None = None
        self._host: HostMemory | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    def start_up(self, progress: Progress) -> int:
        """Allocate the staging buffer, before the KV cache takes the rest of the device's memory."""
        row_bytes = sum(cache[0].nbytes for cache in self._distinct())
        rows = max(1, min(self._num_slots, STAGING_BYTES // row_bytes))
        self._staging = torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device)
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Allocate the slots, and run the copies of one once, so that none of their kernels is loaded later."""
        self._host = HostMemory(self._num_slots, self._staging.shape[1], pinned=self._stream is not None)
        for copies in (self._copy_out, self._copy_in):
            self._launch(copies, [0], [0]).result()
        if self._stream is not None:
            self._stream.synchronize()

    def begin(self, step: SchedulerOutput) -> None:
        """Let a step follow the save of a block that it reuses."""
        if (number := copies_before(step.extras)) is None:
            return
        while self._saves and self._saves[0][0] <= number:
            saved, copies = self._saves.popleft()
            if saved == number and (event := copies.result()) is not None:
                event.wait()

    def open_files(self, folder: str) -> None:
        """Keep files in a folder, which is the replica's."""
        self._files = BlockFiles(Path(folder) / str(self._rank))

    def save(
        self,
        number: int,
        slots: Sequence[int],
        blocks: Sequence[int],
        files: Sequence[tuple[int, str]] = (),
        removed: Sequence[str] = (),
    ) -> None:
        """Copy blocks to slots, once the steps submitted so far have ended.

        Then write some of the slots to files, and remove other files.
        """
        copies = self._launch(self._copy_out, slots, blocks)
        self._saves.append((number, copies))
        for slot, name in files:
            self._writes.append((name, self._writer.submit(self._write, name, slot, copies)))
        for name in removed:
            self._writer.submit(self._open_files.remove, name)

    def load(
        self, number: int, blocks: Sequence[int], slots: Sequence[int], files: Sequence[tuple[int, str]] = ()
    ) -> None:
        """Copy slots to blocks, once the steps submitted so far have ended, and files were read into some slots."""
        reads = {}
        if files:  # copies from and to these slots may be running
            before = self._launch(self._copy_out, (), ())
            reads = {slot: self._readers.submit(self._read, name, slot, before) for slot, name in files}
        self._loads.append(PendingLoad(number, [*slots], [*blocks], reads))
        self._launch_loads()

    def _write(self, name: str, slot: int, before: Launched) -> bool:
        _wait_for(before)
        return self._open_files.write(name, self._rows[slot].numpy().data)

    def _read(self, name: str, slot: int, before: Launched) -> bool:
        _wait_for(before)
        return self._open_files.read(name, self._rows[slot].numpy().data)

    @property
    def _open_files(self) -> BlockFiles:
        assert self._files is not None
        return self._files

    def _launch_loads(self) -> None:
        for load in self._loads:
            if load.copies is None and all(read.done() for read in load.reads.values()):
                there = [slot not in load.reads or load.reads[slot].result() for slot in load.slots]
                slots, blocks = [*compress(load.slots, there)], [*compress(load.blocks, there)]
                load.copies = self._launch(self._copy_in, slots, blocks)

    def arrived(self) -> Arrived:
        """Return the loads and the writes of files that have finished since the last call."""
        self._launch_loads()
        ended = [load for load in self._loads if load.copies is not None and _has_ended(load.copies)]
        self._loads = [load for load in self._loads if load not in ended]
        while self._saves and _has_ended(self._saves[0][1]):
            self._saves.popleft()
        loads = [(load.number, [slot for slot, read in load.reads.items() if not read.result()]) for load in ended]
        done = [*takewhile(lambda each: each[1].done(), self._writes)]  # one thread writes them in this order
        self._writes = self._writes[len(done) :]
        return Arrived(loads, [(name, write.result()) for name, write in done])

    def _launch(
        self, copies: Callable[[list[int], list[int]], None], slots: Sequence[int], blocks: Sequence[int]
    ) -> Launched:
        """Let the thread launch copies, which follow the steps submitted so far. On a CPU, make them."""
        pairs = sorted(zip(slots, blocks, strict=True))
        if self._launcher is None:
            made: Launched = Future()
            self._copy(copies, pairs)
            made.set_result(None)
            return made
        before = torch.cuda.current_stream(self._device).record_event()
        return self._launcher.submit(self._copy_on_stream, copies, pairs, before)

    def _copy_on_stream(
        self, copies: Callable[[list[int], list[int]], None], pairs: list[tuple[int, int]], before: torch.cuda.Event
    ) -> torch.cuda.Event:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            before.wait()
            self._copy(copies, pairs)
            return self._stream.record_event()

    @torch.inference_mode()
    def _copy(self, copies: Callable[[list[int], list[int]], None], pairs: list[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), len(self._staging)):
            part = pairs[start : start + len(self._staging)]
            copies([slot for slot, _ in part], [block for _, block in part])

    def _copy_out(self, slots: list[int], blocks: list[int]) -> None:
        """Copy blocks, as many as the staging buffer has room for, to slots, which ascend."""
        indices, staging = upload(np.array(blocks), self._device), self._staging[: len(blocks)]
        for cache, part in self._parts(staging):
            part.copy_(cache.index_select(0, indices))
        for start, stop in _runs(slots):
            self._rows[slots[start] : slots[start] + stop - start].copy_(staging[start:stop], non_blocking=True)

    def _copy_in(self, slots: list[int], blocks: list[int]) -> None:
        indices, staging = upload(np.array(blocks), self._device), self._staging[: len(blocks)]
        for start, stop in _runs(slots):
            staging[start:stop].copy_(self._rows[slots[start] : slots[start] + stop - start], non_blocking=True)
        for cache, part in self._parts(staging):
            cache.index_copy_(0, indices, part)

    @property
    def _rows(self) -> torch.Tensor:
        assert self._host is not None
        return self._host.rows

    def _distinct(self) -> list[torch.Tensor]:
        """Return the caches of all layers; a cache that layers share comes once."""
        return [*{id(cache): cache for cache in self._caches}.values()]

    def _parts(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's cache [N, words] and its part of the staging buffer, in the widest words that fit all."""
        caches = [cache.view(torch.uint8).flatten(1) for cache in self._distinct() if cache.numel()]
        word = torch.int64 if all(cache.shape[1] % 8 == 0 for cache in caches) else torch.uint8
        start = 0
        for cache in caches:
            stop = start + cache.shape[1]
            yield cache.view(word), staging.view(word)[:, start // word.itemsize : stop // word.itemsize]
            start = stop

    def metrics(self) -> dict[str, int]:
        return {"kv_offload_bytes": 0 if self._host is None else self._host.nbytes}

    def close(self) -> None:
        """Wait for all copies and files."""
        if self._launcher is not None:
            self._launcher.shutdown()
        self._readers.shutdown()
        self._writer.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        if self._host is not None:
            self._host.close()
        self._host = None
        self._caches, self._staging = (), torch.empty(0)


def _has_ended(copies: Launched) -> bool:
    return copies.done() and ((event := copies.result()) is None or event.query())


def _wait_for(copies: Launched) -> None:
    if (event := copies.result()) is not None:
        event.synchronize()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the places of each run of consecutive numbers."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield start, place
            start = place
