"""Interfaces of the resources that a request holds while it runs, such as blocks of a KV group or a runner's row.

`KVCacheManager` gives a request its part of every resource, or of none if one has no room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from compiled_engine.engine.request import Request


class CacheResource(Protocol):
    """A resource that tracks which part of it each request holds. Requests are compared by identity, not by id."""

    kind: str  # name of the resource in metrics

    def longest_prefix(self, request: Request, most: int) -> int:
        """Return the length of the longest prefix, of at most `most` tokens, that this resource has cached.

        A resource without a prefix cache returns `most`. A call with the returned number as `most` must return that
        number again.
        """
        ...

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        """Return whether the request can be given a part for `num_tokens` tokens.

        num_cached: how many of the first tokens are cached, see `longest_prefix`. reserve: number of requests that must
        each be able to take one more block afterwards.
        """
        ...

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Give the request its part, with the arguments for which `has_room` has just returned True."""
        ...

    def free(self, request: Request) -> None:
        """Release the request's part. Raises RuntimeError if it has none."""
        ...

    def check_all_free(self) -> None:
        """Raise RuntimeError if any part is held. Takes constant time. Call it when no request is left."""
        ...

    def check_integrity(self, holders: Collection[Request]) -> None:
        """Raise RuntimeError unless exactly `holders` have a part, and the resource's own records are consistent."""
        ...


@runtime_checkable
class FindableResource(CacheResource, Protocol):
    """A resource with a prefix cache: contents in numbered places, such as blocks, can be reused by later requests."""

    def take_registered(self) -> list[int]:
        """Return the places added to the prefix cache since the last call.

        Steps in flight may still have to fill them.
        """
        ...

    def unregister(self, places: Iterable[int]) -> None:
        """Remove places from the prefix cache, because their contents were not written."""
        ...

    def unregister_all(self) -> None:
        """Remove every place from the prefix cache."""
        ...


class PlaceWatcher(Protocol):
    """Watches which places of a FillableResource can be found, while steps are planned and processed."""

    def place_taken(self, place: int, block_hash: bytes) -> None:
        """Handle a place whose contents the step being planned writes. block_hash: hash of the prefix's last block."""
        ...

    def place_evicted(self, place: int) -> None:
        """Handle a place whose prefix cannot be found any more, because the place is given to another prefix."""
        ...

    def place_dropped(self, place: int) -> None:
        """Handle a place that cannot be found any more: it was not written, or all places were forgotten."""
        ...


class FillableResource(FindableResource, Protocol):
    """A FindableResource in which a prefix has one place, found by the hash of the prefix's last block.

    A feature may be its `watcher`, copy contents elsewhere, and fill places with them again (`begin_fill`, `end_fill`).
    """

    watcher: PlaceWatcher | None

    def __contains__(self, block_hash: bytes) -> bool: ...

    def begin_fill(self, block_hash: bytes) -> int | None:
        """Reserve and return a place, to which the contents of a prefix will be copied after the submitted steps.

        Returns None if all places are held, or used by the step being planned.
        """
        ...

    def end_fill(self, place: int, *, filled: bool) -> None:
        """End the reservation of a place. If filled, the place can be found from now on; otherwise it becomes free.

        It also becomes free if another place already has the same prefix.
        """
        ...


def check_holders(what: str, holding: Collection[Request], holders: Collection[Request]) -> None:
    """Raise RuntimeError unless the requests `holding` a resource are exactly `holders`, which should hold it.

    what: the resource's name in the error.
    """
    should, do = set(holders), set(holding)
    for verb, requests in (("hold", do - should), ("do not hold", should - do)):
        if requests:
            names = sorted(request.request_id for request in requests)
            raise RuntimeError(f"requests {names} {verb} {what}")


class RequestRows:
    """The rows of the runner's RequestStates, as a CacheResource. A request holds one row, whatever its length."""

    kind = "rows"

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        self.num_rows = num_rows
        self._holders: set[Request] = set()

    def longest_prefix(self, request: Request, most: int) -> int:
        return most

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        return len(self._holders) < self.num_rows

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        if request in self._holders:
            raise RuntimeError(f"request {request.request_id!r} has a row already")
        if len(self._holders) == self.num_rows:
            raise RuntimeError(f"request {request.request_id!r} asks for a row, but all {self.num_rows} are held")
        self._holders.add(request)

    def free(self, request: Request) -> None:
        if request not in self._holders:
            raise RuntimeError(f"request {request.request_id!r} gives back a row, but has none")
        self._holders.remove(request)

    def check_all_free(self) -> None:
        if self._holders:
            raise RuntimeError(f"no request is left, but {len(self._holders)} of {self.num_rows} rows are held")

    def check_integrity(self, holders: Collection[Request]) -> None:
        check_holders("a row", self._holders, holders)
        if len(self._holders) > self.num_rows:
            raise RuntimeError(f"{len(self._holders)} rows are held, but there are {self.num_rows}")
