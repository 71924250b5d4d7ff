"""The pool of blocks: references, the order of the free list, and hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from compiled_engine.engine.block_pool import BlockPool, hash_block, hash_blocks
from compiled_engine.engine.messages import ROOT, Content


def hashes_of(*token_ids: int, known: int = 0) -> list[bytes]:
    """Return the hashes of blocks of two tokens, computed at once, or the first `known` before the others."""
    hashes: list[bytes] = []
    hash_blocks(hashes, ROOT, token_ids, 2, known)
    hash_blocks(hashes, ROOT, token_ids, 2)
    return hashes


def test_a_hash_covers_the_block_and_all_before_it() -> None:
    first, second = hashes_of(1, 2, 3, 4, 5)
    other, behind = hashes_of(1, 9, 3, 4)
    assert len({first, second, other, behind, *hashes_of(3, 4)}) == 5
    assert all(hashes_of(1, 2, 3, 4, 5, known=known) == [first, second] for known in range(3))


def test_hashes_are_the_same_in_every_process() -> None:
    data = bytes(32) + (258).to_bytes(4, "little") + (7).to_bytes(4, "little")
    assert hashes_of(258, 7) == [hash_block(ROOT, array("i", [258, 7]).tobytes())] == [hashlib.sha256(data).digest()]


def hashes_with(*contents: Content) -> list[bytes]:
    hashes: list[bytes] = []
    hash_blocks(hashes, ROOT, [7] * 12, 4, contents=contents)
    return hashes


def test_a_hash_covers_what_stands_at_the_positions_of_the_block() -> None:
    usual, picture, other = hashes_with(), hashes_with(Content(5, 4, "a")), hashes_with(Content(5, 4, "b"))
    assert picture == hashes_with(Content(5, 4, "a"))
    assert usual[0] == picture[0] == other[0]
    for block in (1, 2):
        found = [usual, picture, other, hashes_with(Content(4, 4, "a")), hashes_with(Content(5, 3, "a"))]
        assert len({hashes[block] for hashes in found}) == len(found)
    # The third block has one position of it, but another one.
    assert hashes_with(Content(3, 6, "a"))[2] != hashes_with(Content(8, 1, "a"))[2]
    assert hashes_with(Content(12, 4, "a")) == usual


class ReadContents(list[Content]):
    """Contents that count how many of them are read."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Content]:
        for each in super().__iter__():
            self.num_read += 1
            yield each


def test_a_block_reads_few_of_the_contents_of_a_prompt() -> None:
    contents = ReadContents(Content(4 * number, 3, str(number)) for number in range(500))
    hash_blocks([], ROOT, [7] * 2000, 4, contents=contents)
    assert 500 <= contents.num_read < 500 * 25


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


def test_every_block_is_given_out_once() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert not pool.is_free(block)
    pool.release(block)
    assert pool.is_free(block)
    with pytest.raises(RuntimeError, match="block 0 is released but has no reference"):
        pool.release(block)
    pool.check_integrity([])


def test_the_block_freed_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.register(block, bytes([block]))
    for block in (b, c, a):
        pool.release(block)
    assert pool.find(bytes([b])) == b
    assert pool.allocate(1) == [b]
    assert pool.find(bytes([b])) is None
    assert pool.find(bytes([c])) == c
    assert pool.allocate(2) == [c, a]


def test_blocks_without_findable_contents_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, blank, kept = pool.allocate(3)
    pool.register(cached, b"cached")
    pool.release(cached)
    pool.release(blank)
    assert pool.allocate(1) == [blank]
    pool.check_integrity([[blank, kept]])


def test_a_found_block_leaves_the_free_list() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"first")
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    assert pool.num_free == 1
    assert pool.allocate(1) == [second]
    pool.check_integrity([[first], [second]])


def test_equal_contents_are_registered_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    pool.unregister(second)
    assert pool.find(b"same") == first
    pool.unregister(first)
    assert pool.find(b"same") is None
    pool.check_integrity([[first], [second]])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0]], "block 1 has 1 references, but 0 tables hold it"),
        ([[0, 1], [1]], "block 1 has 1 references, but 2 tables hold it"),
        ([[0, 1], [2]], "block 2 has 0 references, but 1 tables hold it"),
        ([[0, 1, 1]], "holds a block twice"),
        ([[0, 1, 9]], r"blocks \[9\] do not exist; there are 3"),
    ],
    ids=["leaked", "shared without a reference", "freed too early", "twice", "unknown"],
)
def test_the_integrity_check_says_what_is_wrong(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity([[0, 1]])
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity(tables)
