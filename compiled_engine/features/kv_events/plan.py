"""The planning part of KV events: turns changes of the prefix cache into events, and publishes them after each step.

A block is stored when a step that fills it is scheduled, as requests can find it from then on. If that step fails, the
block is removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.messages import ROOT, Content, RunnerOutput, prefix_root
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.adapters.extras import adapter_of
from compiled_engine.features.kv_events.events import (
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    short_hash,
)
from compiled_engine.process.forks import unless_forked

COUNTERS = ("kv_event_batches", "kv_events", "kv_event_batches_dropped")
# A request finds a block only with all blocks before it, in models with windows too.
KIND = "full_attention"


class EventSink(Protocol):
    """Interface of what takes events, such as Publisher. Calls of `publish` do not wait."""

    num_batches: int
    num_events: int
    num_dropped: int

    def publish(self, events: list[Event]) -> None: ...

    def close(self) -> None: ...


class KVEvents(PlanFeature):
    """Publishes the changes of the prefix cache to `sink`, which it closes."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._groups: list[GroupEvents] = []
        self._events: list[Event] = []
        self._close = weakref.finalize(self, unless_forked(sink.close))  # if `close` is not called
        self._close.atexit = False

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Watch the block groups. Return no resource, since requests hold nothing for events."""
        for index, group in enumerate(groups):
            group.watch(GroupEvents(index, group.block_size, self._events, self._publish))
        return ()

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        self._publish()

    def failed(self) -> None:
        self._publish()

    def metrics(self) -> dict[str, Any]:
        sink = self._sink
        return dict(zip(COUNTERS, (sink.num_batches, sink.num_events, sink.num_dropped), strict=True))

    def close(self) -> None:
        self._publish()
        self._close()

    def _publish(self) -> None:
        if self._events:
            self._sink.publish(self._events.copy())
            self._events.clear()


class GroupEvents:
    """A BlockWatcher that appends the events of a KV group to `events`.

    publish: publishes `events`, called when the group is cleared, since no step may follow that would publish them.
    """

    def __init__(self, index: int, block_size: int, events: list[Event], publish: Callable[[], None]) -> None:
        self._index, self._block_size, self._events, self._publish = index, block_size, events, publish

    def registered(self, request: Request, indices: Sequence[int], hashes: Sequence[bytes]) -> None:
        adapter, size = adapter_of(request.asked), self._block_size
        for first, stop in _runs(indices):
            self._events.append(
                BlockStored(
                    block_hashes=[short_hash(each) for each in hashes[first:stop]],
                    parent_block_hash=short_hash(hashes[first - 1]) if first else None,
                    token_ids=request.token_ids[first * size : stop * size],
                    block_size=size,
                    lora_id=None,
                    medium=GPU,
                    lora_name=None if adapter is None else adapter.name or adapter.digest,
                    extra_keys=extra_keys(request, first, stop, size),
                    group_idx=self._index,
                    kv_cache_spec_kind=KIND,
                )
            )

    def evicted(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        removed, last = [*map(short_hash, hashes)], self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == self._index:
            last.block_hashes.extend(removed)
        else:
            self._events.append(BlockRemoved(removed, GPU, self._index))

    def dropped(self, block: int, block_hash: bytes) -> None:
        self.evicted([block], [block_hash])

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())
        self._publish()


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) for each run of consecutive numbers: the run is range(first, stop). indices: ascending."""
    first = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[place - 1] + 1:
            yield indices[first], indices[place - 1] + 1
            first = place


def extra_keys(request: Request, first: int, stop: int, block_size: int) -> list[list[str] | None] | None:
    """Return the keys that the hash of each block covers besides token ids; None if no block has any.

    The blocks are those from `first` to `stop` - 1. The keys of a block are its adapter's name, the keys of the
    contents that it has a part of, and, in a prompt's first block, a digest that only requests with the same cache salt
    have. The core does not know the salt itself.
    """
    adapter, contents = adapter_of(request.asked), request.asked.contents
    root = ROOT if adapter is None else prefix_root(adapter=adapter.digest)
    keys: list[list[str] | None] = []
    for index in range(first, stop):
        of_block = [] if adapter is None else [adapter.name or adapter.digest]
        of_block += [each.key for each in contents if _overlaps(each, index * block_size, (index + 1) * block_size)]
        if index == 0 and request.prefix_root != root:
            of_block.append(request.prefix_root.hex())
        keys.append(of_block or None)
    return keys if any(keys) else None


def _overlaps(content: Content, start: int, stop: int) -> bool:
    return content.first < stop and start < content.first + content.count
