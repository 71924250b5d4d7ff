"""The blocks of the KV cache: who holds them, what they contain, and which is given out next.

Prefix caching by chained hashes follows vLLM's automatic prefix caching; block tables follow PagedAttention
(Kwon et al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks with reference counts; those without references wait in a free list.

    A free block keeps its contents findable by hash until it is given out again. The free list starts with
    the blocks that hold nothing findable, then come the others, the one freed longest ago first.
    Every operation on a block takes constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def find(self, block_hash: bytes) -> int | None:
        """The block registered under this hash; it may be free, and is not acquired."""
        return self._block_of_hash.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free list; what they held can no longer be found.

        Raises RuntimeError, taking none, if there are not as many.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.unregister(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a block that was found."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. Raises RuntimeError if there is none (the block would be freed twice)."""
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} is released but has no reference")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a block that is held findable, unless another one with the same contents already is."""
        if block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block
            self._hashes[block] = block_hash

    def unregister(self, block: int) -> None:
        """Make a block unfindable, if it was findable."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None

    def check_all_free(self) -> None:
        """Raise RuntimeError if a block is held, though no request is left to hold it."""
        if self.num_free != self.num_blocks:
            raise RuntimeError(f"no request is left, but only {self.num_free} of {self.num_blocks} blocks are free")

    def unregister_all(self) -> None:
        """Make every block unfindable."""
        for block in list(self._block_of_hash.values()):
            self.unregister(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless all is consistent and exactly `block_tables` hold the pool's blocks."""
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
