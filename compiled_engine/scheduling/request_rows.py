"""The rows of the runner, of which a request has one while it runs. Which one is the runner's choice."""

from __future__ import annotations

from collections.abc import Collection

from compiled_engine.scheduling.cache_resource import check_holders
from compiled_engine.scheduling.request import Request


class RequestRows:
    """Implements CacheResource: `num_rows` rows, whatever the number of tokens."""

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
