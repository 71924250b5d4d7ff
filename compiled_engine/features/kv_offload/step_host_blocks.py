"""Makes the copies of KV offload on a rank, for rows of all kinds, and reads and writes the files.

On a GPU, copies run on a separate stream, one after the other and after the steps that were submitted before. Steps do
not wait for copies, except before they reuse a row that is being copied. A thread launches the copies, since it waits
for those before. On a CPU, copies are made at once. Other threads read and write files; a load's rows are copied while
its other files are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.kv_offload.block_files import BlockFiles
from compiled_engine.features.kv_offload.extras import (
    ARRIVED,
    LOAD,
    NAME,
    OPEN_FILES,
    SAVE,
    Arrived,
    Copies,
    copies_before,
)
from compiled_engine.features.kv_offload.host_rows import HostRows
from compiled_engine.process.cores import usable_cores
from compiled_engine.process.progress import Progress

# Threads that read files: one alone is slower than the bus, mostly by the checksum.
MOST_READERS = 16
# Rows that are copied together, unless no other file of their load is being read.
TOGETHER = 8

Launched = Future[torch.cuda.Event | None]
"""The event after copies, once they are launched; None on a CPU."""


@dataclass
class Reading:
    """A row whose file is being read into its slot."""

    kind: str
    slot: int
    row: int
    name: str
    ended: Future[bool]  # whether the file could be read


@dataclass(eq=False)
class PendingLoad:
    """A load that has not ended."""

    number: int
    before: torch.cuda.Event | None  # the end of the steps that its copies follow; None on a CPU
    reads: deque[Reading]  # those whose copies are not launched, in the order in which they begin
    launched: list[Launched] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # names of files

    def take_read(self) -> dict[str, Copies]:
        """Remove the rows whose files are read from `reads`, and return them by kind, without those that failed.

        Returns {} if these are fewer than TOGETHER and other files are still being read.
        """
        done = [*takewhile(lambda each: each.ended.done(), self.reads)]
        if len(done) < min(TOGETHER, len(self.reads)):
            return {}
        found: dict[str, Copies] = {}
        for each in done:
            self.reads.popleft()
            if each.ended.result():
                copies = found.setdefault(each.kind, Copies([], [], []))
                copies.slots.append(each.slot)
                copies.rows.append(each.row)
            else:
                self.failed.append(each.name)
        return found


class StepHostBlocks(StepFeature):
    """Copies rows between a rank's device and host memory.

    kinds: the HostRows of each kind of row. rank: index of the rank.
    """

    name = NAME
    calls = (SAVE, LOAD, ARRIVED, OPEN_FILES)

    def __init__(self, kinds: Mapping[str, HostRows], device: torch.device, rank: int) -> None:
        self._kinds, self._device, self._rank = dict(kinds), device, rank
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._launcher = None if self._stream is None else ThreadPoolExecutor(1)
        self._readers, self._writer = ThreadPoolExecutor(min(usable_cores(), MOST_READERS)), ThreadPoolExecutor(1)
        self._saves: deque[tuple[int, Launched]] = deque()
        self._loads: list[PendingLoad] = []
        self._writes: list[tuple[str, Future[bool]]] = []
        self._files: BlockFiles | None = None

    def compile_kernels(self) -> None:
        for rows in self._kinds.values():
            rows.compile_kernels()

    def start_up(self, progress: Progress) -> int:
        """Allocate the buffers of copies, before the KV cache takes what is left of the device's memory.

        Returns 0, see StepFeature.start_up.
        """
        for rows in self._kinds.values():
            rows.allocate_buffers()
        return 0

    def allocate(self, num_blocks: int) -> None:
        """Allocate the slots, and copy one in both directions, so that all kernels of the copies are loaded now."""
        for rows in self._kinds.values():
            rows.allocate_slots()
            for copy in (rows.copy_out, rows.copy_in):
                self._launch(partial(copy, [0], [0])).result()
            rows.stored = rows.loaded = 0
        if self._stream is not None:
            self._stream.synchronize()

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
        launched = self._launch(partial(self._copy_out, made))
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
        load = PendingLoad(number, self._record_event(), deque())
        names = {kind: dict(each.files) for kind, each in made.items()}
        if any(names.values()):
            before = self._launch(lambda: None, load.before)  # copies from and to these slots may be running
            for kind, each in made.items():
                for slot, row in zip(each.slots, each.rows, strict=True):
                    if (name := names[kind].get(slot)) is not None:
                        ended = self._readers.submit(self._read, name, kind, slot, before)
                        load.reads.append(Reading(kind, slot, row, name, ended))
        in_memory = {kind: _without(each, names[kind]) for kind, each in made.items()}
        if any(each.slots for each in in_memory.values()):
            load.launched.append(self._launch(partial(self._copy_in, in_memory), load.before))
        self._loads.append(load)
        self._launch_loads()

    def _copy_out(self, copies: Mapping[str, Copies]) -> None:
        for kind, each in copies.items():
            self._kinds[kind].copy_out(each.slots, each.rows)

    def _copy_in(self, copies: Mapping[str, Copies]) -> None:
        for kind, each in copies.items():
            self._kinds[kind].copy_in(each.slots, each.rows)

    def _write(self, name: str, kind: str, slot: int, before: Launched) -> bool:
        _wait_for(before)
        return self._open_files.write(name, self._kinds[kind].slot(slot))

    def _read(self, name: str, kind: str, slot: int, before: Launched) -> bool:
        _wait_for(before)
        return self._open_files.read(name, self._kinds[kind].slot(slot))

    @property
    def _open_files(self) -> BlockFiles:
        assert self._files is not None
        return self._files

    def _launch_loads(self) -> None:
        for load in self._loads:
            if load.reads and (copies := load.take_read()):
                load.launched.append(self._launch(partial(self._copy_in, copies), load.before))

    def arrived(self) -> Arrived:
        """Launch the copies of the files that are read.

        Return the loads and file writes that have ended since the last call.
        """
        self._launch_loads()
        ended = [load for load in self._loads if not load.reads and all(map(_has_ended, load.launched))]
        self._loads = [load for load in self._loads if load not in ended]
        while self._saves and _has_ended(self._saves[0][1]):
            self._saves.popleft()
        loads = [(load.number, load.failed) for load in ended]
        done = [*takewhile(lambda each: each[1].done(), self._writes)]  # one thread writes them in this order
        self._writes = self._writes[len(done) :]
        return Arrived(loads, [(name, write.result()) for name, write in done])

    def _launch(self, copies: Callable[[], None], before: torch.cuda.Event | None = None) -> Launched:
        """Make the thread launch copies that run after `before`, by default the steps submitted so far.

        Returns their future. On a CPU, the copies are made at once. copies: a function that launches them.
        """
        before = before or self._record_event()
        if self._launcher is None or before is None:
            made: Launched = Future()
            copies()
            made.set_result(None)
            return made
        return self._launcher.submit(self._copy_on_stream, copies, before)

    def _record_event(self) -> torch.cuda.Event | None:
        """Return an event at the end of the steps submitted so far; None on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def _copy_on_stream(self, copies: Callable[[], None], before: torch.cuda.Event) -> torch.cuda.Event:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            before.wait()
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


def _without(copies: Copies, slots: Collection[int]) -> Copies:
    """Return the copies without those of `slots`, and without files."""
    pairs = [pair for pair in zip(copies.slots, copies.rows, strict=True) if pair[0] not in slots]
    return Copies([slot for slot, _ in pairs], [row for _, row in pairs], [])


def _has_ended(launched: Launched) -> bool:
    return launched.done() and ((event := launched.result()) is None or event.query())


def _wait_for(launched: Launched) -> None:
    if (event := launched.result()) is not None:
        event.synchronize()
