"""The table of loaded adapters, and of the slots that running requests hold.

An adapter is loaded into the ranks' host memory when it is named, and placed in one of their slots when the first of
its requests is admitted. A slot keeps its adapter after the last request until another adapter needs the slot; the
least recently used adapter is evicted. A request whose adapter finds no slot waits until one is free; overtaking.py
decides which requests may overtake it. Copies in host memory that no request uses are dropped when there are more than
`max_cpu_loras`, the least recently used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from compiled_engine.config import AdapterConfig
from compiled_engine.engine.cache_resource import check_holders
from compiled_engine.engine.request import Request
from compiled_engine.features.adapters.extras import AdapterRef, adapter_of

# Most adapter names whose requests are counted.
MOST_COUNTED = 1000
# Metrics that add up over replicas.
COUNTERS = ("adapter_loads", "adapter_placements", "adapter_requests")
GAUGES = ("adapters_loaded", "adapters_in_slots", "adapter_requests_running", "adapter_requests_waiting")


class AdapterTable:
    """Tracks loaded adapters and their slots. A CacheResource, since a running request's adapter must have a slot."""

    kind = "adapter_slots"

    def __init__(self, config: AdapterConfig) -> None:
        self._num_slots = config.max_loras
        self._most_loaded = max(config.max_cpu_loras, config.max_loras)
        # Number of unfinished requests of each loaded adapter (by digest), the least recently used adapter first.
        self._uses: dict[str, int] = {}
        self._slots: dict[str, int] = {}  # slots of placed adapters, the least recently used first
        self._holders: dict[Request, str] = {}  # running requests and their adapters
        self._placed: dict[int, str] = {}  # adapters placed since the last step, by slot
        self._names: dict[str, str] = {}  # names of loaded adapters in their newest requests
        self._requests: dict[str, int] = {}  # requests since the start by adapter name, the last used name last
        self._changed = False  # a slot was given away, or may have become free
        self.loads = self.placements = 0  # adapters read into host memory, and placed in slots

    def is_loaded(self, digest: str) -> bool:
        return digest in self._uses

    def loaded(self, digest: str) -> list[str]:
        """Record that the ranks have an adapter. Return the digests of the adapters that they must drop."""
        self.loads += 1
        self._uses[digest] = 0
        surplus = len(self._uses) - self._most_loaded
        unused = [each for each, uses in self._uses.items() if uses == 0 and each != digest]
        dropped = unused[: max(0, surplus)]
        for each in dropped:
            del self._uses[each]
            self._names.pop(each, None)
        return dropped

    def unload(self, digest: str) -> bool:
        """Forget an adapter unless a request uses it. Return whether the ranks must drop it."""
        if self._uses.get(digest) != 0:
            return False
        del self._uses[digest]
        self._names.pop(digest, None)
        return True

    def add(self, adapter: AdapterRef | None) -> None:
        """Count a new request. `adapter` must be loaded; it is None for a request without an adapter."""
        if adapter is not None:
            self._uses[adapter.digest] = self._uses.pop(adapter.digest) + 1
            self._names[adapter.digest] = adapter.name
            self._requests[adapter.name] = self._requests.pop(adapter.name, 0) + 1
            if len(self._requests) > MOST_COUNTED:
                del self._requests[next(iter(self._requests))]

    def end(self, adapter: AdapterRef | None) -> None:
        """Count the end of a request. adapter: as in `add`."""
        if adapter is not None:
            self._uses[adapter.digest] -= 1

    def slot_of(self, adapter: AdapterRef) -> int:
        """Return the slot of a running request's adapter."""
        return self._slots[adapter.digest]

    def take_placed(self) -> dict[int, str]:
        """Return the adapters that were placed since the last call, by slot."""
        placed, self._placed = self._placed, {}
        return placed

    def forget_slots(self) -> None:
        """Consider all slots empty, after a failed step. The step may not have placed its adapters."""
        self._slots.clear()
        self._placed.clear()
        self._changed = True

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of COUNTERS (since the start) and of GAUGES (current numbers), and max_adapters.

        Numbers of requests are dicts by adapter name. adapter_requests only has the MOST_COUNTED names used most
        recently.
        """
        running = Counter(self._holders.values())
        return {
            "max_adapters": self._num_slots,
            "adapters_loaded": len(self._uses),
            "adapters_in_slots": len(self._slots),
            "adapter_loads": self.loads,
            "adapter_placements": self.placements,
            "adapter_requests": dict(self._requests),
            "adapter_requests_running": self._by_name(running),
            "adapter_requests_waiting": self._by_name(Counter(self._uses) - running),
        }

    def _by_name(self, counts: Counter[str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for digest, count in counts.items():
            found[self._names[digest]] += count
        return dict(found)

    def longest_prefix(self, request: Request, most: int) -> int:
        return most

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        adapter = adapter_of(request.asked)
        return adapter is None or self.has_slot(adapter)

    def has_slot(self, adapter: AdapterRef) -> bool:
        """Return whether the adapter is in a slot, or could be placed in one now."""
        if adapter.digest in self._slots or len(self._slots) < self._num_slots:
            return True
        return len(set(self._holders.values())) < self._num_slots

    def takes_changes(self) -> bool:
        """Return whether results of `has_slot` may have changed since the last call of this method."""
        changed, self._changed = self._changed, False
        return changed

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        if (adapter := adapter_of(request.asked)) is None:
            return
        if request in self._holders:
            raise RuntimeError(f"request {request.request_id!r} has a slot already")
        digest = adapter.digest
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._placed_slot(digest)
            self._changed = True
        self._slots[digest] = slot  # used most recently
        self._holders[request] = digest

    def free(self, request: Request) -> None:
        if adapter_of(request.asked) is None:
            return
        if self._holders.pop(request, None) is None:
            raise RuntimeError(f"request {request.request_id!r} gives back a slot, but has none")
        self._changed = True

    def check_all_free(self) -> None:
        if self._holders or any(self._uses.values()):
            raise RuntimeError(f"no request is left, but {len(self._holders)} hold slots of adapters")

    def check_integrity(self, holders: Collection[Request]) -> None:
        adapted = [request for request in holders if adapter_of(request.asked) is not None]
        check_holders("a slot of an adapter", self._holders, adapted)
        if len(set(self._slots.values())) != len(self._slots) or len(self._slots) > self._num_slots:
            raise RuntimeError(f"adapters are in slots {self._slots}, of which there are {self._num_slots}")
        waiting = Counter(self._holders.values())
        if wrong := [digest for digest, count in waiting.items() if self._uses.get(digest, 0) < count]:
            raise RuntimeError(f"adapter {wrong[0]} is in use, but not loaded")

    def _placed_slot(self, digest: str) -> int:
        if len(self._slots) < self._num_slots:
            slot = min(set(range(self._num_slots)) - set(self._slots.values()))
        else:
            held = set(self._holders.values())
            evicted = next((each for each in self._slots if each not in held), None)
            if evicted is None:
                raise RuntimeError(f"an adapter asks for a slot, but all {self._num_slots} are held")
            slot = self._slots.pop(evicted)
        self._placed[slot] = digest
        self.placements += 1
        return slot
