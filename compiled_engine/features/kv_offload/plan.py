"""Plans KV offload: which rows are copied to host memory, and which requests wait for rows to be copied back.

Rows are the blocks of the prefix cache and, with recurrences, the snapshots of states, see kept_rows.py. If a step
reuses a row whose copy to host memory may still run, the device runs the step after that copy. A row that is reused
before its copy has begun is not copied.

A request whose prefix has rows in host memory or in files is not admitted until these rows are copied back. Meanwhile
blocks of the KV cache, and if needed the slot of a snapshot, are reserved for the copies. Then the prefix cache has the
rows, and the request is admitted. Rows that are computed sooner than copied are not waited for, see break_even.py. A
request waits once per admission; rows that are evicted before the admission are computed again, so that requests cannot
wait for one another. With recurrences, a prefix ends at a snapshot, and later blocks are not copied back.

With files, each row that is copied to host memory is also written to a file. The file is read when the row is needed
after its slot was given to another row, or after the engine was started again.

Control calls tell the ranks which copies to make. A rank makes them in the order of the calls, on a separate stream.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.engine.block_pool import BlockGroup, Fill, leading_hashes
from compiled_engine.engine.cache_resource import CacheResource, FillableResource
from compiled_engine.engine.messages import ControlCall, RunnerOutput
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.kv_offload.break_even import BreakEven
from compiled_engine.features.kv_offload.extras import (
    ARRIVED,
    BLOCKS,
    COPY_SECONDS,
    LOAD,
    NAME,
    OPEN_FILES,
    SAVE,
    STATES,
)
from compiled_engine.features.kv_offload.file_index import STATE_SUFFIX, FileIndex
from compiled_engine.features.kv_offload.kept_files import KeptFiles
from compiled_engine.features.kv_offload.kept_rows import KeptRows, RowsToLoad

COUNTERS = (
    *("kv_offload_saved", "kv_offload_loaded", "kv_offload_queries", "kv_offload_hits"),
    *("kv_offload_written", "kv_offload_read", "kv_offload_file_errors"),
    *("kv_offload_saved_states", "kv_offload_loaded_states", "kv_offload_read_states"),
    *("kv_offload_store_bytes", "kv_offload_load_bytes"),  # of a rank
)
GAUGES = (
    *("kv_offload_blocks", "kv_offload_slots", "kv_offload_files", "kv_offload_writing"),
    *("kv_offload_states", "kv_offload_state_slots"),
)
# Blocks that are copied together, unless no step is in flight: the ranks' launches cost about the same for one block.
TOGETHER = 32
# Steps between two checks for written files, whose slots may then be given away.
CHECK_WRITES_EVERY = 16
# Seconds between two checks for finished copies while no step is in flight.
PATIENCE_S = 0.0003


@dataclass(eq=False, slots=True)
class Load:
    """Copies to a request's rows on the device, which have begun and not ended."""

    fill: Fill
    held: int  # tokens of the request's prefix that are on the device already
    blocks: RowsToLoad
    indices: Sequence[int]  # of these blocks in the prefix
    state: tuple[int, RowsToLoad] | None  # the snapshot: its slot on the device, and its row
    failed: set[str] = field(default_factory=set)  # names of files that a rank could not read
    num_ranks: int = 0  # ranks that have finished
    is_stale: bool = False  # the prefix cache was emptied after the load had begun


class HostBlocks(PlanFeature):
    """Plans the copies between the device and `num_slots` slots for blocks in host memory.

    Implements BlockWatcher and PlaceWatcher. call_ranks: Executor.call. files: the index of the rows' files; None: no
    files. snapshots: the snapshots of the prefix cache, with `num_state_slots` slots of host memory; None: the model
    has no recurrences. least_tokens: rows are copied back only if this saves computing at least so many tokens; None:
    measured times say how many, see break_even.py. together: number of blocks that are saved together while steps are
    in flight.
    """

    def __init__(
        self,
        num_slots: int,
        call_ranks: Callable[[ControlCall], list[Any]],
        files: FileIndex | None = None,
        *,
        snapshots: FillableResource | None = None,
        num_state_slots: int = 0,
        least_tokens: int | None = None,
        together: int = TOGETHER,
    ) -> None:
        self._call_ranks, self._least_tokens, self._together = call_ranks, least_tokens, together
        self._files = KeptFiles(files)
        self._blocks = KeptRows(BLOCKS, num_slots, self._files)
        self._snapshots, self._states = snapshots, None
        if snapshots is not None:
            self._states = KeptRows(STATES, num_state_slots, self._files, STATE_SUFFIX)
            snapshots.watcher = self
        self._group: BlockGroup | None = None
        self._num_steps = 0  # planned so far
        self._in_flight: set[int] = set()
        self._num_saves = self._num_loads = 0
        self._follows = 0  # the save that the step being planned follows
        self._loads: dict[int, Load] = {}
        # Requests whose loads have begun or ended, with the tokens that needed no copies; maxsize: none was copied.
        self._has_waited: dict[Request, int] = {}
        self._any_arrived = False
        self._counts = dict.fromkeys(("queries", "hits", "read", "read_states"), 0)
        if files is not None:
            self._tell(OPEN_FILES, folder=str(files.folder))
        self._break_even = BreakEven(self._tell(COPY_SECONDS) if least_tokens is None else ())

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Watch the group of blocks, if there is one. Return no resource, since requests hold no slots."""
        for group in groups:
            self._group = group
            group.watch(self)
        return ()

    # Changes of the prefix cache

    def registered(self, request: Request, indices: Sequence[int], hashes: Sequence[bytes]) -> None:
        assert self._group is not None
        found = [hashes[index] for index in indices]
        blocks = [block for block in self._group.pool.find_each(found) if block is not None]
        self._blocks.registered(blocks, found, self._num_steps + 1)

    def evicted(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._follows = max(self._follows, self._blocks.evicted(blocks))

    def dropped(self, block: int, block_hash: bytes) -> None:
        self._blocks.dropped(block)

    def cleared(self) -> None:
        """Forget all rows in host memory, and use no files from now on, since the weights may have changed."""
        for kept in self._kinds:
            kept.clear()
        self._follows = self._num_saves  # `evicted` is not called for rows that cannot be found
        self._files.stop()
        for load in self._loads.values():
            load.is_stale = True

    def place_taken(self, place: int, block_hash: bytes) -> None:
        assert self._states is not None
        self._states.registered([place], [block_hash], self._num_steps + 1)

    def place_evicted(self, place: int) -> None:
        assert self._states is not None
        self._follows = max(self._follows, self._states.evicted([place]))

    def place_dropped(self, place: int) -> None:
        assert self._states is not None
        self._states.dropped(place)

    @property
    def _kinds(self) -> Sequence[KeptRows]:
        return (self._blocks,) if self._states is None else (self._blocks, self._states)

    # Copies to host memory

    def planned(self, step: StepInFlight) -> None:
        self._num_steps = step.output.step
        self._in_flight.add(self._num_steps)
        num_prompt_tokens = step.output.num_tokens - len(step.output.counts) * step.decode_tokens
        self._break_even.planned(self._num_steps, num_prompt_tokens, time.perf_counter())
        if self._follows:
            step.output.extras[NAME] = self._follows
            self._follows = 0
        if self._loads or (self._files.num_writing and self._num_steps % CHECK_WRITES_EVERY == 0):
            self._look()

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        self._in_flight.remove(step.output.step)
        self._break_even.updated(step.output.step, time.perf_counter())
        rows = [kept.written_by(step.output.step) for kept in self._kinds]
        blocks, states = rows[0], rows[1:]
        if any(states) or (blocks and (len(blocks) >= self._together or not self._in_flight)):
            self._save(rows)

    def _save(self, rows_of_kinds: Sequence[Sequence[int]]) -> None:
        if self._files.num_writing:
            self._look()  # slots of files that are written may be given away
        made = {
            kept.kind: kept.begin_save(rows, self._num_saves + 1)
            for kept, rows in zip(self._kinds, rows_of_kinds, strict=True)
        }
        if any(copies.slots for copies in made.values()):
            self._num_saves += 1
            self._tell(SAVE, number=self._num_saves, copies=made, removed=self._files.take_removed())

    def failed(self) -> None:
        self._in_flight.clear()
        self._break_even.failed()
        self._follows = self._num_saves  # steps that followed a save may not have run
        self._num_steps += 1  # a step may have failed while it was planned

    # Copies back

    def may_start(self, request: Request) -> bool:
        """Return whether a request may be admitted. If not, it waits for rows of its prefix to be copied to the device.

        Begins that load if it saves computing enough tokens and the KV cache has room for the request.
        """
        group = self._group
        if group is None or request.computes_every_token or request in self._has_waited:
            return all(load.fill.request is not request for load in self._loads.values())
        size = group.block_size
        most = (len(request.token_ids) - 1) // size
        hashes = leading_hashes(request, size, most)[:most]
        count, missing = self._kept_prefix(hashes)
        state = hashes[count - 1] if count and self._lacks_snapshot(hashes[count - 1]) else None
        if not missing and state is None:
            return True
        if self._blocks.are_arriving(hashes[index] for index in missing):
            return False
        if state is not None and self._states is not None and self._states.are_arriving([state]):
            return False
        held = group.longest_prefix(request, count * size)
        if self._snapshots is not None:
            held = self._snapshots.longest_prefix(request, held)
        if count * size - held < self._least(has_state=state is not None) or not self._has_room(request):
            return True
        return not self._load(request, held, hashes[:count], missing, state)

    def _least(self, *, has_state: bool) -> int:
        """Return how many tokens a load must save. has_state: it loads a snapshot, too."""
        assert self._group is not None
        if self._least_tokens is not None:
            return self._least_tokens
        return self._break_even.least_tokens(self._group.block_size, has_state=has_state)

    def _kept_prefix(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return how many leading blocks of a prefix are stored anywhere, and the indices of those to load.

        hashes: of the prefix's blocks. A block may be stored in the KV cache, in host memory or in a file; it must be
        loaded if it is not in the KV cache. With recurrences, the last of the leading blocks must have a stored
        snapshot.
        """
        assert self._group is not None
        count, missing = len(hashes), []
        for index, block in enumerate(self._group.pool.find_each(hashes)):
            if block is None:
                if hashes[index] not in self._blocks:
                    count = index
                    break
                missing.append(index)
        if (states := self._states) is not None:
            while count and self._lacks_snapshot(hashes[count - 1]) and hashes[count - 1] not in states:
                count -= 1
            missing = [index for index in missing if index < count]
        return count, missing

    def _lacks_snapshot(self, block_hash: bytes) -> bool:
        return self._snapshots is not None and block_hash not in self._snapshots

    def _has_room(self, request: Request) -> bool:
        assert self._group is not None
        num_tokens = len(request.token_ids)
        return self._group.has_room(request, num_tokens, self._group.longest_prefix(request, num_tokens - 1), 0)

    def _load(
        self, request: Request, held: int, hashes: Sequence[bytes], missing: Sequence[int], state: bytes | None
    ) -> bool:
        """Begin to copy rows of a request's prefix to the device. Return whether a load has begun.

        held: tokens of the prefix that are on the device. hashes: of the prefix's blocks. missing: indices in `hashes`
        of the blocks to load. state: hash of the snapshot to load; None for none.
        """
        assert self._group is not None
        if self._files.num_writing:
            self._look()
        self._has_waited[request] = sys.maxsize
        blocks = self._blocks.begin_load([hashes[index] for index in missing])
        num_blocks, loads_all, of_state = len(blocks.slots), len(blocks.slots) == len(missing), None
        if not loads_all and self._states is not None:
            _cancel(self._blocks, blocks)  # blocks before the snapshot are no use alone
            return False
        if state is not None:
            assert self._states is not None
            assert self._snapshots is not None
            rows = self._states.begin_load([state])
            place = self._snapshots.begin_fill(state) if rows.slots else None
            if place is None:
                _cancel(self._states, rows)
                _cancel(self._blocks, blocks)
                return False
            of_state = place, rows
        if not num_blocks and of_state is None:
            return False
        indices = missing[:num_blocks]  # later blocks are computed
        fill = self._group.begin_fill(request, len(hashes) if loads_all else indices[-1] + 1)
        self._num_loads += 1
        self._loads[self._num_loads] = Load(fill, held, blocks, indices, of_state)
        copies = {BLOCKS: blocks.copies([fill.blocks[index] for index in indices])}
        if of_state is not None:
            copies[STATES] = of_state[1].copies([of_state[0]])
        self._tell(LOAD, number=self._num_loads, copies=copies)
        return True

    def reconsiders(self) -> bool:
        if self._loads:
            if not self._in_flight:
                time.sleep(PATIENCE_S)
            self._look()
        any_arrived, self._any_arrived = self._any_arrived, False
        return any_arrived

    def _look(self) -> None:
        """Ask the ranks which loads and file writes have finished, and process these."""
        for arrived in (ranks := self._tell(ARRIVED)):
            loads, written = arrived
            for number, failed in loads:
                load = self._loads[number]
                load.failed.update(failed)
                load.num_ranks += 1
                if load.num_ranks == len(ranks):
                    self._end_load(self._loads.pop(number))
            for name, is_there in written:
                self._files.end_write(name, is_there, len(ranks))

    def _end_load(self, load: Load) -> None:
        assert self._group is not None
        places = self._end_rows(self._blocks, load, load.blocks)
        if load.state is not None:
            assert self._states is not None
            assert self._snapshots is not None
            slot, rows = load.state
            self._snapshots.end_fill(slot, filled=bool(self._end_rows(self._states, load, rows)))
        self._group.end_fill(load.fill, {load.indices[place] for place in places})
        if (request := load.fill.request) in self._has_waited and not load.is_stale:
            self._has_waited[request] = load.held
        self._any_arrived = True

    def _end_rows(self, kept: KeptRows, load: Load, rows: RowsToLoad) -> Sequence[int]:
        """Record that copies have ended. Return the places in `rows` of those with valid contents on the device."""
        failed = {place for place, name in rows.files.items() if name in load.failed}
        for place in failed:
            self._files.lose(rows.files[place])
        kept.end_load(rows, () if load.is_stale else failed)
        self._counts["read" if kept is self._blocks else "read_states"] += len(rows.files) - len(failed)
        places = () if load.is_stale else [place for place in range(len(rows.slots)) if place not in failed]
        kept.loaded += len(places)
        return places

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        hits = max(0, request.num_computed_tokens - self._has_waited.pop(request, sys.maxsize))
        self._counts["queries"] += len(request.token_ids) - request.num_computed_tokens + hits
        self._counts["hits"] += hits
        if request.num_computed_tokens and self._group is not None:
            count = request.num_computed_tokens // self._group.block_size
            hashes = leading_hashes(request, self._group.block_size, count)[:count]
            self._blocks.use(hashes)
            if self._states is not None:
                self._states.use(hashes[-1:])

    def ended(self, request: Request) -> None:
        self._has_waited.pop(request, None)

    def _tell(self, name: str, **arguments: Any) -> list[Any]:
        return self._call_ranks(ControlCall(f"{NAME}.{name}", arguments))

    def metrics(self) -> dict[str, Any]:
        found = {
            "saved": self._blocks.saved,
            "loaded": self._blocks.loaded,
            **self._counts,
            "written": self._files.written,
            "file_errors": self._files.errors,
            "blocks": len(self._blocks.slots),
            "slots": self._blocks.slots.count,
            "files": len(self._files),
            "writing": self._files.num_writing,
            "least_tokens": 0 if self._group is None else self._least(has_state=False),
        }
        if (states := self._states) is not None:
            found |= {"saved_states": states.saved, "loaded_states": states.loaded}
            found |= {"states": len(states.slots), "state_slots": states.slots.count}
        else:
            del found["read_states"]
        return {f"{NAME}_{name}": value for name, value in found.items()}

    def close(self) -> None:
        self._files.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the slots of host memory are inconsistent."""
        for kept in self._kinds:
            kept.slots.check_integrity()


def _cancel(kept: KeptRows, rows: RowsToLoad) -> None:
    """End a load before its copies begin. Slots whose files were to be read have no contents."""
    kept.end_load(rows, rows.files)
