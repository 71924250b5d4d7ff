"""Which blocks of the KV cache each request holds, and how requests share the blocks of a common prefix.

Only full blocks are shared. Other requests can find a block once the step that fills it is scheduled and its tokens
are known. Requests that are admitted to that same step (copies of one prompt, for example) find the blocks that shares
of several tokens fill, and no others: a step with such a share writes the K and V of all its tokens before any of its
queries attends, but a step of single tokens may write and attend in one kernel, whose order among requests is open. So
a block that a single token completes can be found from the next step on. `Scheduler.schedule` keeps this rule.

Blocks are released at once, though steps in flight may still write to them. Steps run in the order in which they were
scheduled, so whoever gets such a block writes to it later, and reads only what it wrote. Nor can a write in flight
spoil a registered block, held or not: all its tokens are known, so what is written is the very token that its hash
covers. A token that is still unknown lies beyond all registered blocks of its request; if the request ends before it
is known, its block is never registered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from compiled_engine.prefix_hashes import hash_blocks
from compiled_engine.scheduling.block_pool import BlockPool
from compiled_engine.scheduling.request import Request


class KVCacheManager:
    """The pool of blocks, and the block tables of requests (`Request.block_ids`).

    prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache and found there, over all
    requests when first admitted.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._registered: list[int] = []

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache can hold."""
        return self.pool.num_blocks * self.block_size

    def admit(self, request: Request, reserve: int) -> bool:
        """Give a request without blocks those for all its tokens, shared ones where a prefix is cached.

        All or nothing: False, and no change, if fewer than `reserve` blocks would stay free. Sets
        `num_computed_tokens` to the tokens that need not be computed; at least one always does.
        """
        cached = self._find_prefix(request)
        fresh = self._blocks_for(len(request.token_ids)) - len(cached)
        if fresh + sum(map(self.pool.is_free, cached)) + reserve > self.pool.num_free:
            return False
        for block in cached:
            self.pool.acquire(block)
        request.block_ids = cached + self.pool.allocate(fresh)
        request.num_slots = len(request.block_ids) * self.block_size
        self._set_registered(request, len(cached))
        request.num_computed_tokens = len(cached) * self.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self._may_read_prefix(request):
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += request.num_cached_tokens
        return True

    def allocate(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Give the request blocks for `num_tokens` more tokens, and return those that it did not have yet.

        All or nothing: None, and no change, if the pool has too few free blocks.
        """
        missing_slots = request.num_computed_tokens + num_tokens - request.num_slots
        if missing_slots <= 0:
            return ()
        missing = self._blocks_for(missing_slots)
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        request.block_ids += blocks
        request.num_slots += missing * self.block_size
        return tuple(blocks)

    def register(self, request: Request) -> None:
        """Make the blocks findable that are full of known tokens, computed or scheduled to be."""
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_registered_blocks
        if num_full <= first or not self.enable_prefix_caching:
            return
        self._hash_blocks(request, num_full)
        for index in range(first, num_full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        self._registered += request.block_ids[first:num_full]
        self._set_registered(request, num_full)

    def take_registered(self) -> list[int]:
        """The blocks that `register` was given since this was last called: steps in flight may be to fill them."""
        registered, self._registered = self._registered, []
        return registered

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, because what they were to hold was not written."""
        for block in blocks:
            self.pool.unregister(block)

    def free(self, request: Request) -> None:
        """Release all blocks, the last one first, so that the end of a cached sequence is evicted first."""
        for block in reversed(request.block_ids):
            self.pool.release(block)
        request.block_ids = []
        request.num_slots = 0
        request.num_computed_tokens = 0

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise RuntimeError unless exactly `holders` hold blocks, and each block is accounted for."""
        tables = []
        for request in holders:
            if request.num_computed_tokens > len(request.block_ids) * self.block_size:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_computed_tokens} tokens computed, "
                    f"but {len(request.block_ids)} blocks of {self.block_size}"
                )
            tables.append(request.block_ids)
        self.pool.check_integrity(tables)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _set_registered(self, request: Request, count: int) -> None:
        request.num_registered_blocks = count
        request.next_block_end = (count + 1) * self.block_size if self.enable_prefix_caching else sys.maxsize

    def _may_read_prefix(self, request: Request) -> bool:
        return self.enable_prefix_caching and not request.owes_prompt_logprobs

    def _find_prefix(self, request: Request) -> list[int]:
        """The blocks of the longest cached prefix that leaves at least one token to compute."""
        blocks: list[int] = []
        if not self._may_read_prefix(request):
            return blocks
        num_full = (len(request.token_ids) - 1) // self.block_size
        self._hash_blocks(request, num_full)
        for block_hash in request.block_hashes[:num_full]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hash_blocks(self, request: Request, count: int) -> None:
        """Know the hashes of the first `count` blocks."""
        hash_blocks(request.block_hashes, request.prefix_root, request.token_ids, self.block_size, count)
