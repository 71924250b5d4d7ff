"""The planning part of KV offload: which blocks are copied to host memory, and which requests wait for copies back.

A block that the prefix cache has is copied to a slot once its contents are written, that is, when a step was processed
that was planned after its registration. If the KV cache reuses the block before, it is not copied. A step that reuses
a block whose copy may still run follows that copy on the device.

A request whose prefix has blocks in slots, or in files, is skipped until they are copied to blocks of the KV cache,
which are held meanwhile. Then they can be found like all others, and the request is admitted. A request waits once per
admission; what the KV cache loses before that is computed again, so that requests cannot wait for one another.

With a FileIndex, each block that is copied to a slot is also written to files, from where it comes back to a slot after
the slot was given away, or the engine was started again. Once the prefix cache was emptied, files are neither read nor
written, as the weights may not be those of the checkpoint any more.

The ranks make copies when they are told, in the order of control calls, and on a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.engine.block_pool import BlockGroup, Fill, leading_hashes
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.messages import ControlCall, RunnerOutput
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.kv_offload.extras import ARRIVED, LOAD, NAME, OPEN_FILES, SAVE
from compiled_engine.features.kv_offload.file_index import FileIndex
from compiled_engine.features.kv_offload.slots import Slots

COUNTERS = (
    *("kv_offload_saved", "kv_offload_loaded", "kv_offload_queries", "kv_offload_hits"),
    *("kv_offload_written", "kv_offload_read", "kv_offload_file_errors"),
)
GAUGES = ("kv_offload_blocks", "kv_offload_slots", "kv_offload_files")
# Least tokens that are loaded: fewer are computed again about as fast.
LEAST_TOKENS = 256
# Blocks that are copied together, unless no step is in flight: the ranks' launches cost about the same for one block.
TOGETHER = 32
# Time between two looks at copies if there is nothing else to do, in seconds.
PATIENCE_S = 0.0003


@dataclass(eq=False, slots=True)
class Write:
    """A slot whose block is being written to files."""

    slot: int
    is_there: bool = True  # on all ranks so far
    num_ranks: int = 0  # that have ended


@dataclass(eq=False, slots=True)
class Load:
    """Copies to blocks of the KV cache that have begun."""

    fill: Fill
    slots: dict[int, int]  # by index in the prefix
    num_files: int  # blocks that are read from files
    failed: set[int] = field(default_factory=set)  # slots that a rank could not fill
    num_ranks: int = 0  # that have ended
    is_stale: bool = False  # the prefix cache was emptied since


class HostBlocks(PlanFeature):
    """Plans the copies of an engine with `num_slots` slots, as a BlockWatcher. call_ranks: Executor.call.

    files: of blocks outside host memory; None: there are none. longest_prefix: returns the tokens of a request's prefix
    that other resources than blocks have, given their most (FindableResource.longest_prefix); None: all.
    """

    def __init__(
        self,
        num_slots: int,
        call_ranks: Callable[[ControlCall], list[Any]],
        files: FileIndex | None = None,
        *,
        longest_prefix: Callable[[Request, int], int] | None = None,
        least_tokens: int = LEAST_TOKENS,
        together: int = TOGETHER,
    ) -> None:
        self._call_ranks, self._least_tokens, self._together = call_ranks, least_tokens, together
        self._longest_prefix = longest_prefix
        self._slots = Slots(num_slots)
        self._group: BlockGroup | None = None
        self._num_steps = 0  # planned so far
        self._in_flight: set[int] = set()
        # Registered blocks that are not copied yet, the oldest first: hash, and number of the step that follows.
        self._unsaved: dict[int, tuple[bytes, int]] = {}
        self._num_saves = self._num_loads = 0
        self._leaving: dict[int, int] = {}  # the number of the last save of blocks that were not reused since
        self._follows = 0  # the save that the step being planned follows
        self._loads: dict[int, Load] = {}
        self._arriving: set[bytes] = set()  # hashes of blocks that are being loaded
        self._has_waited: dict[Request, int] = {}  # with the number of tokens that were loaded
        self._any_arrived = False
        self._files, self._uses_files = files, files is not None
        self._writes: dict[str, Write] = {}  # by name of the file
        self._to_remove: list[str] = []  # names of files
        if files is not None:
            self._tell(OPEN_FILES, folder=str(files.folder))
        self._counts = dict.fromkeys(COUNTERS, 0)

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Watch the group of blocks, of which there is at most one. Requests hold no slots: return no resource."""
        for group in groups:
            self._group = group
            group.watch(self)
        return ()

    # Changes of the prefix cache

    def registered(self, request: Request, indices: Sequence[int], hashes: Sequence[bytes]) -> None:
        assert self._group is not None
        for index in indices:
            if self._slots.use(hashes[index]) is None:
                block = self._group.pool.find(hashes[index])
                assert block is not None
                self._unsaved[block] = hashes[index], self._num_steps + 1

    def evicted(self, block: int, block_hash: bytes) -> None:
        self._unsaved.pop(block, None)
        self._follows = max(self._follows, self._leaving.pop(block, 0))

    def dropped(self, block: int, block_hash: bytes) -> None:
        self._unsaved.pop(block, None)

    def cleared(self) -> None:
        """Free all slots, as keys and values may have changed their meaning."""
        self._slots.clear()
        self._unsaved.clear()
        self._leaving.clear()
        self._follows = self._num_saves  # `evicted` is not called for blocks that cannot be found
        self._uses_files = False
        for load in self._loads.values():
            load.is_stale = True

    # Copies to host memory

    def planned(self, step: StepInFlight) -> None:
        self._num_steps = step.output.step
        self._in_flight.add(self._num_steps)
        if self._follows:
            step.output.extras[NAME] = self._follows
            self._follows = 0
        if self._loads:
            self._look()

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        self._in_flight.remove(step.output.step)
        written = []
        for block, (_, number) in self._unsaved.items():
            if number > step.output.step:
                break
            written.append(block)
        if written and (len(written) >= self._together or not self._in_flight):
            self._save(written)

    def _save(self, blocks: Sequence[int]) -> None:
        if self._writes:
            self._look()  # slots of files that are written may be given away
        copied: dict[int, int] = {}  # blocks by slot
        files: list[tuple[int, str]] = []
        for block in blocks:
            block_hash, _ = self._unsaved.pop(block)
            if self._slots.use(block_hash) is None and (slot := self._slots.take(block_hash)) is not None:
                copied[slot] = block
                self._slots.pin(slot)  # it has one block in a save
                if self._begin_write(block_hash.hex(), slot):
                    files.append((slot, block_hash.hex()))
        for slot in copied:
            self._slots.unpin(slot)
        if copied:
            self._num_saves += 1
            self._leaving.update(dict.fromkeys(copied.values(), self._num_saves))
            self._counts["kv_offload_saved"] += len(copied)
            number, removed, self._to_remove = self._num_saves, self._to_remove, []
            self._tell(SAVE, number=number, slots=[*copied], blocks=[*copied.values()], files=files, removed=removed)

    def _begin_write(self, name: str, slot: int) -> bool:
        """Return whether a slot must be written to a file, which keeps it from being given away."""
        if self._files is None or not self._uses_files or name in self._files or name in self._writes:
            return False
        self._to_remove += self._files.add(name)
        self._writes[name] = Write(slot)
        self._slots.pin(slot)
        return True

    def failed(self) -> None:
        self._in_flight.clear()
        self._follows = self._num_saves  # steps that followed a save may not have run
        self._num_steps += 1  # a step may have failed while it was planned

    # Copies back

    def may_start(self, request: Request) -> bool:
        """Let a request wait for the part of its prefix that is not in the KV cache, if that part is long enough."""
        group = self._group
        if group is None or request.computes_every_token or request in self._has_waited:
            return all(load.fill.request is not request for load in self._loads.values())
        size, most = group.block_size, len(request.token_ids) - 1
        if self._longest_prefix is not None:
            most = self._longest_prefix(request, most)
        most //= size
        stored = []  # indices of blocks to copy
        for index, block_hash in enumerate(leading_hashes(request, size, most)[:most]):
            if group.pool.find(block_hash) is None:
                if not (block_hash in self._slots or self._has_file(block_hash)):
                    break
                if block_hash in self._arriving:
                    return False
                stored.append(index)
        if not stored or len(stored) * size < self._least_tokens or not self._has_room(request):
            return True
        return not self._load(request, stored)

    def _has_room(self, request: Request) -> bool:
        assert self._group is not None
        num_tokens = len(request.token_ids)
        return self._group.has_room(request, num_tokens, self._group.longest_prefix(request, num_tokens - 1), 0)

    def _load(self, request: Request, stored: Sequence[int]) -> bool:
        """Begin to load blocks, by index in the prefix. Returns whether any is loaded."""
        assert self._group is not None
        hashes = leading_hashes(request, self._group.block_size, stored[-1] + 1)
        slots: dict[int, int] = {}
        files: list[tuple[int, str]] = []
        if self._writes:
            self._look()
        known = [self._slots.use(hashes[index]) for index in stored]
        for slot in known:
            if slot is not None:
                self._slots.pin(slot)
        for index, slot in zip(stored, known, strict=True):
            if slot is None:
                if (slot := self._slots.take(hashes[index])) is None:
                    break  # what follows is computed
                self._slots.pin(slot)
                files.append((slot, hashes[index].hex()))
                self._use_file(hashes[index])
            slots[index] = slot
        for slot in known[len(slots) :]:
            if slot is not None:
                self._slots.unpin(slot)
        self._has_waited[request] = 0
        if not slots:
            return False
        fill = self._group.begin_fill(request, max(slots) + 1)
        self._num_loads += 1
        self._loads[self._num_loads] = Load(fill, slots, len(files))
        self._arriving.update(hashes[index] for index in slots)
        blocks = [fill.blocks[index] for index in slots]
        self._tell(LOAD, number=self._num_loads, blocks=blocks, slots=[*slots.values()], files=files)
        return True

    def _has_file(self, block_hash: bytes) -> bool:
        return self._files is not None and self._uses_files and block_hash.hex() in self._files

    def _use_file(self, block_hash: bytes) -> None:
        assert self._files is not None
        self._files.use(block_hash.hex())

    def reconsiders(self) -> bool:
        if self._loads:
            if not self._in_flight:
                time.sleep(PATIENCE_S)
            self._look()
        any_arrived, self._any_arrived = self._any_arrived, False
        return any_arrived

    def _look(self) -> None:
        """Process the loads and writes that the ranks have finished."""
        for arrived in (ranks := self._tell(ARRIVED)):
            loads, written = arrived
            for number, failed in loads:
                load = self._loads[number]
                load.failed.update(failed)
                load.num_ranks += 1
                if load.num_ranks == len(ranks):
                    self._end_load(self._loads.pop(number))
            for name, is_there in written:
                write = self._writes[name]
                write.is_there &= is_there
                write.num_ranks += 1
                if write.num_ranks == len(ranks):
                    self._end_write(name, self._writes.pop(name))

    def _end_write(self, name: str, write: Write) -> None:
        assert self._files is not None
        self._slots.unpin(write.slot)
        self._counts["kv_offload_written"] += write.is_there
        if not write.is_there:
            self._lose_file(name)

    def _lose_file(self, name: str) -> None:
        assert self._files is not None
        self._counts["kv_offload_file_errors"] += 1
        self._files.drop(name)
        self._to_remove.append(name)  # other ranks may have it

    def _end_load(self, load: Load) -> None:
        assert self._group is not None
        filled = {index for index, slot in load.slots.items() if not load.is_stale and slot not in load.failed}
        for index, slot in load.slots.items():
            block_hash = load.fill.hashes[index]
            self._arriving.discard(block_hash)
            if slot in load.failed:
                self._lose_file(block_hash.hex())
                if not load.is_stale:
                    self._slots.drop(block_hash)
            self._slots.unpin(slot)
        self._group.end_fill(load.fill, filled)
        self._counts["kv_offload_loaded"] += len(filled)
        self._counts["kv_offload_read"] += load.num_files - len(load.failed)
        if (request := load.fill.request) in self._has_waited:
            self._has_waited[request] = len(filled) * self._group.block_size
        self._any_arrived = True

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        hits = self._has_waited.pop(request, 0)
        self._counts["kv_offload_queries"] += len(request.token_ids) - request.num_computed_tokens + hits
        self._counts["kv_offload_hits"] += hits

    def ended(self, request: Request) -> None:
        self._has_waited.pop(request, None)

    def _tell(self, name: str, **arguments: Any) -> list[Any]:
        return self._call_ranks(ControlCall(f"{NAME}.{name}", arguments))

    def metrics(self) -> dict[str, Any]:
        own = {"kv_offload_blocks": len(self._slots), "kv_offload_slots": self._slots.count}
        return {**self._counts, **own, "kv_offload_files": 0 if self._files is None else len(self._files)}

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the slots are consistent."""
        self._slots.check_integrity()
