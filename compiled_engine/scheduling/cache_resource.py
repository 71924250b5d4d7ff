"""What a request occupies while it runs: blocks of a KV group, a row of the runner.

`KVCacheManager` asks all resources together and takes from all or from none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from compiled_engine.scheduling.request import Request


class CacheResource(Protocol):
    """Knows which request holds how much of it. A request is identified by the object, not by its id."""

    def longest_prefix(self, request: Request, most: int) -> int:
        """Return how many of the request's first `most` tokens need not be computed, as far as this resource goes.

        Asked again for what it returned, it returns the same.
        """
        ...

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        """Whether a request without a share can have what `num_tokens` tokens need, the first `num_cached` of them from
        the prefix cache. reserve: how many requests are to have room to grow afterwards."""
        ...

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Give a request without a share what `has_room` was asked for."""
        ...

    def free(self, request: Request) -> None:
        """Take the request's share back. Raises RuntimeError if it has none."""
        ...

    def check_all_free(self) -> None:
        """Raise RuntimeError if something is held, to be called when no request is left. Takes constant time."""
        ...

    def check_integrity(self, holders: Collection[Request]) -> None:
        """Raise RuntimeError unless exactly `holders` have a share, and everything is accounted for."""
        ...


def check_holders(what: str, holding: Collection[Request], holders: Collection[Request]) -> None:
    """Raise RuntimeError unless the same requests hold a resource as should."""
    should, do = set(holders), set(holding)
    for verb, requests in (("hold", do - should), ("do not hold", should - do)):
        if requests:
            names = sorted(request.request_id for request in requests)
            raise RuntimeError(f"requests {names} {verb} {what}")
