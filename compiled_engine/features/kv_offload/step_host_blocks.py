"""Makes the copies of KV offload on a rank, for rows of all kinds, and reads and writes the files.

On a GPU, copies run on a separate stream, one after the other and after the steps that were submitted before. Steps do
not wait for copies, except before they reuse a row that is being copied. A thread launches the copies, since a long
prefix takes more launches than a stream's queue holds. On a CPU, copies are made at once. Other threads read and write
files. The files of a load are read in pieces, and a piece is copied while others are being read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.kv_offload.block_files import BlockFiles
from compiled_engine.features.kv_offload.extras import (
    ARRIVED,
    COPY_SECONDS,
    LOAD,
    NAME,
    OPEN_FILES,
    SAVE,
    Arrived,
    Copies,
    copies_before,
)
from compiled_engine.features.kv_offload.host_rows import HostRows
from compiled_engine.process.progress import Progress

# Threads that read files: one alone is slower than the bus.
NUM_READERS = 8
# Most files that a thread reads before their rows are copied together. More would overlap less.
MOST_FILES = 8

Launched = Future[torch.cuda.Event | None]
"""The event after copies, once they are launched; None on a CPU."""


@dataclass(eq=False)
class Piece:
    """Rows of a load of one kind that are copied together, once their files are read."""

    kind: str
    copies: Copies
    failed: Future[set[int]]  # slots whose file could not be read
    launched: Launched | None = None

    @property
    def has_ended(self) -> bool:
        return self.launched is not None and _has_ended(self.launched)

    def failed_files(self) -> list[str]:
        """Return the names of the files that could not be read; all files must have been tried."""
        failed = self.failed.result()
        return [name for slot, name in self.copies.files if slot in failed]


@dataclass(eq=False)
class PendingLoad:
    """A load that has not ended."""

    number: int
    after: torch.cuda.Event | None  # the end of the steps that the copies follow; None on a CPU
    pieces: list[Piece]


class StepHostBlocks(StepFeature):
    """Copies rows between a rank's device and host memory.

    kinds: the HostRows of each kind of row. rank: index of the rank.
    """

    name = NAME
    calls = (SAVE, LOAD, ARRIVED, OPEN_FILES, COPY_SECONDS)

    def __init__(self, kinds: Mapping[str, HostRows], device: torch.device, rank: int) -> None:
        self._kinds, self._device, self._rank = dict(kinds), device, rank
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._launcher = None if self._stream is None else ThreadPoolExecutor(1)
        self._readers, self._writer = ThreadPoolExecutor(NUM_READERS), ThreadPoolExecutor(1)
        self._saves: deque[tuple[int, Launched]] = deque()
        self._loads: list[PendingLoad] = []
        self._writes: list[tuple[str, Future[bool]]] = []
        self._files: BlockFiles | None = None
        self._copy_seconds: dict[str, float] = {}

    def compile_kernels(self) -> None:
        for rows in self._kinds.values():
            rows.compile_kernels()

    def start_up(self, progress: Progress) -> int:
        """Allocate the staging buffers, before the KV cache takes what is left of the device's memory.

        Returns 0, see StepFeature.start_up.
        """
        for rows in self._kinds.values():
            rows.allocate_staging()
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Allocate the slots, and copy some in both directions, so that all kernels of the copies are loaded now.

        On a GPU, the copies back are timed, see `copy_seconds`.
        """
        for kind, rows in self._kinds.items():
            rows.allocate_slots()
            places = [0] if self._stream is None else [*range(rows.num_at_once)]
            for copy in (rows.copy_out, rows.copy_in):
                _wait_for(self._launch(partial(copy, places, places), self._steps_so_far()))
            if self._stream is not None:
                begun_s = time.perf_counter()
                _wait_for(self._launch(partial(rows.copy_in, places, places), self._steps_so_far()))
                self._copy_seconds[kind] = (time.perf_counter() - begun_s) / len(places)
            rows.stored = rows.loaded = 0

    def copy_seconds(self) -> dict[str, float]:
        """Return the seconds that the copy of a row to the device takes, by kind of row; {} on a CPU."""
        return self._copy_seconds

    def begin(self, step: SchedulerOutput) -> None:
        """If the step reuses rows that a save still copies, make the device run the step after that save."""
        if (number := copies_before(step.extras)) is None:
            return
        while self._saves and self._saves[0][0] <= number:
            saved, launched = self._saves.popleft()
            if saved == number and (event := launched.result()) is not None:
                event.wait()

    def open_files(self, folder: str) -> None:
        """Use files in `folder`, the folder of this replica. This rank's files are in a subfolder."""
        self._files = BlockFiles(Path(folder) / str(self._rank))

    def save(self, number: int, copies: Mapping[str, Copies], removed: Sequence[str] = ()) -> None:
        """Begin save `number`: copy rows to slots, once the steps submitted so far have ended.

        Then some of the slots are written to files, and the files `removed` are deleted. copies: by kind of row, with
        the slots to write in `Copies.files`.
        """
        made = {kind: Copies(*each) for kind, each in copies.items()}
        launched = self._launch(partial(self._copy_out, made), self._steps_so_far())
        self._saves.append((number, launched))
        for kind, each in made.items():
            for slot, name in each.files:
                self._writes.append((name, self._writer.submit(self._write, name, kind, slot, launched)))
        for name in removed:
            self._writer.submit(self._open_files.remove, name)

    def load(self, number: int, copies: Mapping[str, Copies]) -> None:
        """Begin load `number`: copy slots to rows, once the steps submitted so far have ended.

        Files are first read into the slots of `Copies.files`. copies: by kind of row.
        """
        made = {kind: Copies(*each) for kind, each in copies.items()}
        load = PendingLoad(number, self._steps_so_far(), [])
        if any(each.files for each in made.values()):
            before = self._launch(lambda: None, load.after)  # copies from and to these slots may be running
            for kind, each in made.items():
                for piece in _pieces_of_files(each):
                    load.pieces.append(Piece(kind, piece, self._readers.submit(self._read, kind, piece.files, before)))
        for kind, each in made.items():
            read: Future[set[int]] = Future()
            read.set_result(set())
            in_memory = _without(each, dict(each.files))
            if in_memory.slots:
                load.pieces.append(Piece(kind, in_memory, read))
        self._loads.append(load)
        self._launch_loads()

    def _copy_out(self, copies: Mapping[str, Copies]) -> None:
        for kind, each in copies.items():
            self._kinds[kind].copy_out(each.slots, each.rows)

    def _write(self, name: str, kind: str, slot: int, before: Launched) -> bool:
        _wait_for(before)
        return self._open_files.write(name, self._kinds[kind].slot(slot))

    def _read(self, kind: str, files: Sequence[tuple[int, str]], before: Launched) -> set[int]:
        """Read files into slots, and return the slots whose file could not be read."""
        _wait_for(before)
        rows = self._kinds[kind]
        return {slot for slot, name in files if not self._open_files.read(name, rows.slot(slot))}

    @property
    def _open_files(self) -> BlockFiles:
        assert self._files is not None
        return self._files

    def _launch_loads(self) -> None:
        for load in self._loads:
            for piece in load.pieces:
                if piece.launched is None and piece.failed.done():
                    good = _without(piece.copies, piece.failed.result())
                    copy = partial(self._kinds[piece.kind].copy_in, good.slots, good.rows)
                    piece.launched = self._launch(copy, load.after)

    def arrived(self) -> Arrived:
        """Launch the copies of the pieces whose files are read.

        Return the loads and file writes that have ended since the last call.
        """
        self._launch_loads()
        ended = [load for load in self._loads if all(piece.has_ended for piece in load.pieces)]
        self._loads = [load for load in self._loads if load not in ended]
        while self._saves and _has_ended(self._saves[0][1]):
            self._saves.popleft()
        loads = [(load.number, [name for piece in load.pieces for name in piece.failed_files()]) for load in ended]
        done = [*takewhile(lambda each: each[1].done(), self._writes)]  # one thread writes them in this order
        self._writes = self._writes[len(done) :]
        return Arrived(loads, [(name, write.result()) for name, write in done])

    def _launch(self, copies: Callable[[], None], after: torch.cuda.Event | None) -> Launched:
        """Make the thread launch copies that run after an event. Return their future.

        On a CPU, the copies are made at once. copies: a function that launches them. after: from `_steps_so_far`.
        """
        if self._launcher is None or after is None:
            made: Launched = Future()
            copies()
            made.set_result(None)
            return made
        return self._launcher.submit(self._copy_on_stream, copies, after)

    def _steps_so_far(self) -> torch.cuda.Event | None:
        """Return an event at the end of the steps that were submitted; None on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def _copy_on_stream(self, copies: Callable[[], None], after: torch.cuda.Event) -> torch.cuda.Event:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            after.wait()
            copies()
            return self._stream.record_event()

    def metrics(self) -> dict[str, int]:
        kinds = self._kinds.values()
        return {
            "kv_offload_bytes": sum(rows.nbytes for rows in kinds),
            "kv_offload_store_bytes": sum(rows.stored * rows.row_bytes for rows in kinds),
            "kv_offload_load_bytes": sum(rows.loaded * rows.row_bytes for rows in kinds),
        }

    def close(self) -> None:
        """Wait for all copies and for all reads and writes of files, and free the slots."""
        if self._launcher is not None:
            self._launcher.shutdown()
        self._readers.shutdown()
        self._writer.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        for rows in self._kinds.values():
            rows.close()
        self._kinds.clear()


def _pieces_of_files(copies: Copies) -> Iterator[Copies]:
    """Yield the copies whose slots have files, in pieces: one for each thread at least, if there are enough."""
    row_of = dict(zip(copies.slots, copies.rows, strict=True))
    size = min(MOST_FILES, -(-len(copies.files) // NUM_READERS))
    for first in range(0, len(copies.files), size or 1):
        files = copies.files[first : first + size]
        slots = [slot for slot, _ in files]
        yield Copies(slots, [row_of[slot] for slot in slots], files)


def _without(copies: Copies, slots: Collection[int]) -> Copies:
    """Return copies without those of `slots`, and without files."""
    if not slots:
        return Copies(copies.slots, copies.rows, [])
    kept = [place for place, slot in enumerate(copies.slots) if slot not in slots]
    return Copies([copies.slots[place] for place in kept], [copies.rows[place] for place in kept], [])


def _has_ended(launched: Launched) -> bool:
    return launched.done() and ((event := launched.result()) is None or event.query())


def _wait_for(launched: Launched) -> None:
    if (event := launched.result()) is not None:
        event.synchronize()
