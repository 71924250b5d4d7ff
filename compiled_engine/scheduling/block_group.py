"""The blocks of one KV group: the pool, and the block table of each request that runs.

Layers whose caches have the same block size, dtype and window form a group. All of its layers use the same tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from compiled_engine.prefix_hashes import hash_blocks
from compiled_engine.scheduling.block_pool import BlockPool
from compiled_engine.scheduling.cache_resource import check_holders
from compiled_engine.scheduling.request import Request


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in order. num_registered: leading ones that were offered to the prefix cache. hashes: see
    Request.block_hashes."""

    block_ids: list[int]
    num_registered: int
    hashes: list[bytes]


class BlockGroup:
    """Implements CacheResource; the only resource of which a request may get more while it runs."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._tables: dict[Request, BlockTable] = {}
        self._registered: list[int] = []

    @property
    def num_slots(self) -> int:
        """Tokens that all blocks together can hold."""
        return self.pool.num_blocks * self.block_size

    def block_ids(self, request: Request) -> Sequence[int]:
        """The request's block table."""
        return self._tables[request].block_ids

    def slots_of(self, request: Request) -> int:
        """Tokens that the request's blocks can hold."""
        return len(self._tables[request].block_ids) * self.block_size

    def longest_prefix(self, request: Request, most: int) -> int:
        count = most // self.block_size
        cached = enumerate(self._cached(request, count))
        return self.block_size * next((index for index, block in cached if block is None), count)

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        wanted = self._blocks_for(num_tokens) + reserve
        if num_cached:  # those that others hold take nothing from the free ones
            wanted -= sum(not self.pool.is_free(block) for block in self._prefix(request, num_cached))
        return wanted <= self.pool.num_free

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        if request in self._tables:
            raise RuntimeError(f"request {request.request_id!r} has a block table already")
        cached = self._prefix(request, num_cached)
        for block in cached:
            self.pool.acquire(block)
        fresh = self.pool.allocate(self._blocks_for(num_tokens) - len(cached))
        self._tables[request] = BlockTable(cached + fresh, len(cached), self._hashes(request, len(cached)))

    def can_grow(self, request: Request, num_tokens: int) -> bool:
        """Whether there are the blocks that a request with a table lacks for `num_tokens` tokens."""
        missing = -(-num_tokens // self.block_size) - len(self._tables[request].block_ids)
        return missing <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Add the missing blocks to the request's table; return them."""
        block_ids = self._tables[request].block_ids
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        if missing <= 0:
            return ()
        blocks = self.pool.allocate(missing)
        block_ids += blocks
        return tuple(blocks)

    def free(self, request: Request) -> None:
        """Release the last block first, so that the end of a cached sequence is evicted first."""
        table = self._tables.pop(request, None)
        if table is None:
            raise RuntimeError(f"request {request.request_id!r} gives back its blocks, but has none")
        for block in reversed(table.block_ids):
            self.pool.release(block)

    def register(self, request: Request, num_tokens: int) -> int:
        """Make the blocks findable that lie within the request's first `num_tokens` tokens, all known. Return how many
        have to be known for the next block."""
        table, size = self._tables[request], self.block_size
        first, num_full = table.num_registered, num_tokens // size
        if num_full > first:
            hash_blocks(table.hashes, request.prefix_root, request.token_ids, size, num_full)
            for index in range(first, num_full):
                self.pool.register(table.block_ids[index], table.hashes[index])
            self._registered += table.block_ids[first:num_full]
            table.num_registered = num_full
        return (table.num_registered + 1) * size

    def take_registered(self) -> list[int]:
        """Return the blocks that were registered since the last call: steps in flight may be to fill them."""
        registered, self._registered = self._registered, []
        return registered

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, because what they were to hold was not written."""
        for block in blocks:
            self.pool.unregister(block)

    def check_all_free(self) -> None:
        self.pool.check_all_free()

    def check_integrity(self, holders: Collection[Request]) -> None:
        check_holders("blocks", self._tables, holders)
        for request, table in self._tables.items():
            if request.num_computed_tokens > len(table.block_ids) * self.block_size:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_computed_tokens} tokens computed, "
                    f"but {len(table.block_ids)} blocks of {self.block_size}"
                )
        self.pool.check_integrity(table.block_ids for table in self._tables.values())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """The hashes of the request's first blocks, `count` or more. They outlive a preemption."""
        hashes = request.block_hashes.setdefault(self.block_size, [])
        hash_blocks(hashes, request.prefix_root, request.token_ids, self.block_size, count)
        return hashes

    def _cached(self, request: Request, count: int) -> Iterator[int | None]:
        """For each of the request's first `count` blocks a block with the same contents, or None."""
        return map(self.pool.find, self._hashes(request, count)[:count])

    def _prefix(self, request: Request, num_cached: int) -> list[int]:
        """The blocks of a prefix that `longest_prefix` has found."""
        blocks = [block for block in self._cached(request, num_cached // self.block_size) if block is not None]
        assert len(blocks) * self.block_size == num_cached
        return blocks
