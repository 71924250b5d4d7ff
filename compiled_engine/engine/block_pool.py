"""The blocks of one KV group: their hashes, the pool, and the running requests' block tables.

A group consists of layers with caches of the same block size, dtype and window; all of them use the same tables.

Equal hashes mean equal keys and values in the KV cache. Hashes form a chain of SHA-256: a root
(`messages.prefix_root`), then a hash per full block of tokens. A block's hash covers its token ids and contents such as
images. The root covers everything else that keys and values depend on, or that requests must have in common to share
blocks. Hashes have no random seed, so they are equal in all processes. No two prefixes can be made to collide.

Prefix caching by chained hashes follows vLLM's automatic prefix caching; block tables follow PagedAttention (Kwon et
al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from compiled_engine.engine.cache_resource import check_holders
from compiled_engine.engine.messages import Content
from compiled_engine.engine.request import Request


def hash_block(parent: bytes, tokens: bytes, others: bytes = b"") -> bytes:
    """Return the hash of a full block that follows the block, or root, with hash `parent`.

    The hash covers the block's tokens and, through `parent`, all tokens before them. tokens: the token ids as int32.
    others: bytes that stand for everything else that the block's keys and values depend on, see `_contents_within`.
    """
    return hashlib.sha256(parent + tokens + others).digest()


def hash_blocks(
    hashes: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    count: int | None = None,
    contents: Sequence[Content] = (),
) -> None:
    """Append hashes to `hashes`, until it has the hash of each of a sequence's first `count` blocks.

    hashes: the hashes of the leading blocks that are known already. root: see `prefix_root`. token_ids: the whole
    sequence. count: number of blocks; None: all full blocks. contents: see EngineRequest.
    """
    count = len(token_ids) // block_size if count is None else count
    parent, first = hashes[-1] if hashes else root, len(hashes) * block_size
    tokens = array("i", token_ids[first : count * block_size])
    data, size = tokens.tobytes(), block_size * tokens.itemsize
    for place, start in zip(range(0, len(data), size), range(first, count * block_size, block_size), strict=True):
        others = _contents_within(contents, start, start + block_size) if contents else b""
        parent = hash_block(parent, data[place : place + size], others)
        hashes.append(parent)


def _contents_within(contents: Sequence[Content], start: int, stop: int) -> bytes:
    """Return the joined digests of the `contents` that reach into the block of positions `start` to `stop` - 1.

    A digest covers the content's key, its length, and its offset from `start`.
    """
    return b"".join(
        hashlib.sha256(b"%d %d %s" % (each.first - start, each.count, each.key.encode())).digest()
        for each in contents[
            bisect_right(contents, start, key=lambda each: each.first + each.count) : bisect_left(
                contents, stop, key=lambda each: each.first
            )
        ]
    )


def leading_hashes(request: Request, block_size: int, count: int) -> list[bytes]:
    """Return the hashes of the request's leading blocks: at least `count`, or more if more are known.

    Missing hashes are computed and kept in the request. The returned list is the request's own.
    """
    hashes = request.block_hashes.setdefault(block_size, [])
    if len(hashes) < count:
        hash_blocks(hashes, request.prefix_root, request.token_ids, block_size, count, request.asked.contents)
    return hashes


class BlockWatcher(Protocol):
    """Watches which blocks of a KV group the prefix cache has, that is, which can be found by their hashes.

    The methods are called while steps are planned and processed.
    """

    def registered(self, request: Request, indices: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Handle blocks of a request that can be found from now on. Steps in flight may still have to fill them.

        indices: ascending indices of the blocks in the request's block table. hashes: the hashes of the request's first
        blocks, up to the last of `indices` or further.
        """
        ...

    def evicted(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Handle blocks that cannot be found any more, because they were allocated again. hashes: one for each."""
        ...

    def dropped(self, block: int, block_hash: bytes) -> None:
        """Handle a block that cannot be found any more, because its contents were not written."""
        ...

    def cleared(self) -> None:
        """Handle the removal of all hashes: no block can be found any more."""
        ...


class BlockPool:
    """Counts references to blocks. Blocks without references are in a free list and are allocated from its front.

    A free block can be found by its hash until it is allocated again. A block that is freed without a hash goes to the
    front of the free list, any other to the end. Every operation on a block takes constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.watchers: list[BlockWatcher] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def find(self, block_hash: bytes) -> int | None:
        """Return the block registered under this hash, or None. The block may be free; it is not acquired."""
        return self._block_of_hash.get(block_hash)

    def find_each(self, hashes: Iterable[bytes]) -> Iterator[int | None]:
        """Yield what `find` returns for each hash."""
        return map(self._block_of_hash.get, hashes)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free list, and return them with one reference each.

        Their old contents can no longer be found. Raises RuntimeError, without taking any block, if too few are free.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        evicted = [block for block in blocks if self._hashes[block] is not None]
        if evicted:
            hashes = [self._forget(block) for block in evicted]
            for watcher in self.watchers:
                watcher.evicted(evicted, hashes)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a block that `find` has returned."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference to a block, which becomes free with the last one. Raises RuntimeError if it has none."""
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} is released but has no reference")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Register an acquired block under its hash, unless another block is already registered under this hash.

        Returns whether the block was registered. If so, the caller must call `registered` of the watchers.
        """
        if block_hash in self._block_of_hash:
            return False
        self._block_of_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def unregister(self, block: int) -> None:
        """Remove a block's hash, if it has one, so that the block cannot be found, and tell the watchers."""
        if self._hashes[block] is not None:
            block_hash = self._forget(block)
            for watcher in self.watchers:
                watcher.dropped(block, block_hash)

    def _forget(self, block: int) -> bytes:
        """Remove the hash of a block that has one, and return it."""
        block_hash, self._hashes[block] = self._hashes[block], None
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        return block_hash

    def check_all_free(self) -> None:
        """Raise RuntimeError if any block has a reference. Call it when no request is left."""
        if self.num_free != self.num_blocks:
            raise RuntimeError(f"no request is left, but only {self.num_free} of {self.num_blocks} blocks are free")

    def unregister_all(self) -> None:
        for block in self._block_of_hash.values():
            self._hashes[block] = None
        self._block_of_hash.clear()
        for watcher in self.watchers:
            watcher.cleared()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless the pool is consistent and each block has one reference per table that holds it.

        block_tables: all block tables, and any other lists of acquired blocks.
        """
        held: Counter[int] = Counter()
        for table in block_tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block table holds a block twice: {list(table)}")
            held.update(table)
        for block, references in enumerate(self._references):
            if references != held[block]:
                raise RuntimeError(f"block {block} has {references} references, but {held[block]} tables hold it")
            if (references == 0) != (block in self._free):
                where = "in" if block in self._free else "not in"
                raise RuntimeError(f"block {block} has {references} references and is {where} the free list")
        registered = {h: block for block, h in enumerate(self._hashes) if h is not None}
        if registered != self._block_of_hash or len(registered) != self.num_blocks - self._hashes.count(None):
            raise RuntimeError("the map from hashes to blocks does not match the blocks' own hashes")
        unknown = (held.keys() | self._free.keys()) - set(range(self.num_blocks))
        if unknown:
            raise RuntimeError(f"blocks {sorted(unknown)} do not exist; there are {self.num_blocks}")


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in order."""

    block_ids: list[int]
    num_registered: int  # number of leading blocks offered to the prefix cache
    hashes: list[bytes]  # see Request.block_hashes


@dataclass(eq=False, slots=True)
class Fill:
    """The leading blocks of a waiting request, while a feature copies contents into those that were not cached."""

    request: Request
    hashes: list[bytes]
    blocks: list[int]
    missing: list[int]  # indices of the blocks to fill, ascending


class BlockGroup:
    """The blocks of a KV group and the block tables of the requests; implements FindableResource.

    Unlike other resources, which a request takes only when it is admitted, blocks can be added while it runs (`grow`).
    """

    kind = "blocks"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._tables: dict[Request, BlockTable] = {}
        self._registered: list[int] = []
        self._fills: list[Fill] = []

    def watch(self, watcher: BlockWatcher) -> None:
        """Call `watcher` from now on when blocks can be found, and when they cannot be found any more."""
        self.pool.watchers.append(watcher)

    @property
    def num_slots(self) -> int:
        """The number of tokens that all blocks together can hold."""
        return self.pool.num_blocks * self.block_size

    def block_ids(self, request: Request) -> Sequence[int]:
        return self._tables[request].block_ids

    def slots_of(self, request: Request) -> int:
        """Return how many tokens the request's blocks can hold."""
        return len(self._tables[request].block_ids) * self.block_size

    def longest_prefix(self, request: Request, most: int) -> int:
        count = most // self.block_size
        for index, block in enumerate(self._cached(request, count)):
            if block is None:
                return index * self.block_size
        return count * self.block_size

    def has_room(self, request: Request, num_tokens: int, num_cached: int, reserve: int) -> bool:
        wanted = -(-num_tokens // self.block_size) + reserve
        if num_cached:  # blocks held by other requests do not reduce the free ones
            wanted -= sum(not self.pool.is_free(block) for block in self._prefix(request, num_cached))
        return wanted <= self.pool.num_free

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        if request in self._tables:
            raise RuntimeError(f"request {request.request_id!r} has a block table already")
        cached = self._prefix(request, num_cached) if num_cached else []
        for block in cached:
            self.pool.acquire(block)
        fresh = self.pool.allocate(-(-num_tokens // self.block_size) - len(cached))
        hashes = leading_hashes(request, self.block_size, len(cached))
        self._tables[request] = BlockTable(cached + fresh, len(cached), hashes)

    def begin_fill(self, request: Request, count: int) -> Fill:
        """Acquire the first `count` blocks of a waiting request, and return them as a Fill.

        Blocks that are not cached are allocated; the caller has them filled, and then calls `end_fill`. Raises
        RuntimeError if too few blocks are free; the caller must check `has_room` first.
        """
        cached = list(self._cached(request, count))
        for block in cached:
            if block is not None:
                self.pool.acquire(block)
        missing = [index for index, block in enumerate(cached) if block is None]
        new = dict(zip(missing, self.pool.allocate(len(missing)), strict=True))
        blocks = [new[index] if block is None else block for index, block in enumerate(cached)]
        fill = Fill(request, leading_hashes(request, self.block_size, count)[:count], blocks, missing)
        self._fills.append(fill)
        return fill

    def end_fill(self, fill: Fill, filled: Collection[int]) -> None:
        """End a fill: add the filled blocks to the prefix cache, and release all blocks of the fill.

        filled: indices, among the request's blocks, of the blocks that now have their contents.
        """
        self._fills.remove(fill)
        new = [index for index in fill.missing if index in filled]
        new = [index for index in new if self.pool.register(fill.blocks[index], fill.hashes[index])]
        if new:
            for watcher in self.pool.watchers:
                watcher.registered(fill.request, new, fill.hashes)
        for block in reversed(fill.blocks):
            self.pool.release(block)

    def can_grow(self, request: Request, num_tokens: int) -> bool:
        """Return whether the pool has the blocks that a running request still needs for `num_tokens` tokens."""
        return self._missing(request, num_tokens) <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Add blocks to a running request until it can hold `num_tokens` tokens in all, and return the added blocks.

        Raises RuntimeError if too few blocks are free; see can_grow.
        """
        blocks = self.pool.allocate(max(0, self._missing(request, num_tokens)))
        self._tables[request].block_ids += blocks
        return tuple(blocks)

    def free(self, request: Request) -> None:
        """Release the request's blocks, the last one first, so that the end of a cached sequence is evicted first.

        Raises RuntimeError if the request has no block table.
        """
        table = self._tables.pop(request, None)
        if table is None:
            raise RuntimeError(f"request {request.request_id!r} gives back its blocks, but has none")
        for block in reversed(table.block_ids):
            self.pool.release(block)

    def register(self, request: Request, num_tokens: int) -> int:
        """Add the full blocks among the request's first `num_tokens` tokens to the prefix cache.

        These tokens must be known. Returns how many tokens must be known before another block can be added.
        """
        table, size = self._tables[request], self.block_size
        first, num_full = table.num_registered, num_tokens // size
        if num_full > first:
            hash_blocks(table.hashes, request.prefix_root, request.token_ids, size, num_full, request.asked.contents)
            fresh = [
                index
                for index in range(first, num_full)
                if self.pool.register(table.block_ids[index], table.hashes[index])
            ]
            if fresh:
                for watcher in self.pool.watchers:
                    watcher.registered(request, fresh, table.hashes)
            self._registered += table.block_ids[first:num_full]
            table.num_registered = num_full
        return (table.num_registered + 1) * size

    def take_registered(self) -> list[int]:
        registered, self._registered = self._registered, []
        return registered

    def unregister(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.unregister(block)

    def unregister_all(self) -> None:
        self.pool.unregister_all()

    def check_all_free(self) -> None:
        if not self._fills:
            self.pool.check_all_free()

    def check_integrity(self, holders: Collection[Request]) -> None:
        check_holders("blocks", self._tables, holders)
        for request, table in self._tables.items():
            if request.num_computed_tokens > len(table.block_ids) * self.block_size:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_computed_tokens} tokens computed, "
                    f"but {len(table.block_ids)} blocks of {self.block_size}"
                )
        tables = (table.block_ids for table in self._tables.values())
        self.pool.check_integrity((*tables, *(fill.blocks for fill in self._fills)))

    def _missing(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks the request needs for `num_tokens` tokens; negative if it has spare ones."""
        return -(-num_tokens // self.block_size) - len(self._tables[request].block_ids)

    def _cached(self, request: Request, count: int) -> Iterator[int | None]:
        """Yield, for each of the request's first `count` blocks, the registered block with equal contents, or None."""
        return self.pool.find_each(leading_hashes(request, self.block_size, count)[:count])

    def _prefix(self, request: Request, num_cached: int) -> list[int]:
        """Return the cached blocks of the request's first `num_cached` tokens, a number from `longest_prefix`."""
        blocks = [block for block in self._cached(request, num_cached // self.block_size) if block is not None]
        assert len(blocks) * self.block_size == num_cached
        return blocks
