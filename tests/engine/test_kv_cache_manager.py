"""Cache resources, block tables and prefix caching, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import RequestRows
from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.messages import NO_CACHE, EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.sampling.params import SamplingParams

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 16, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager([BlockGroup(num_blocks, BLOCK_SIZE)], enable_prefix_caching=enable_prefix_caching)


def blocks_of(cache: KVCacheManager, request: Request) -> list[int]:
    (block_ids,) = cache.block_ids(request)
    return list(block_ids)


def make_request(tokens: Sequence[int]) -> Request:
    return Request.of(EngineRequest("r", tuple(tokens), SamplingParams()), order=(0, 0), max_total_tokens=1000)


def compute(cache: KVCacheManager, request: Request) -> None:
    """Pretend that a step computes all that the request knows."""
    request.num_computed_tokens = len(request.token_ids)
    cache.register(request)


def run_once(cache: KVCacheManager, tokens: Sequence[int]) -> list[int]:
    """Admit, compute and free a request; returns the blocks it had."""
    request = make_request(tokens)
    assert cache.admit(request, reserve=0)
    compute(cache, request)
    blocks = blocks_of(cache, request)
    cache.free(request)
    return blocks


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockGroup(4, 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (15, 12)]
)
def test_a_full_hit_leaves_a_token_to_compute_and_only_full_blocks_count(num_tokens: int, num_cached: int) -> None:
    cache = make_cache()
    run_once(cache, range(num_tokens))
    request = make_request(range(num_tokens))
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == request.num_cached_tokens == num_cached
    assert len(blocks_of(cache, request)) == -(-num_tokens // BLOCK_SIZE)
    cache.check_integrity([request])


def test_copies_share_full_blocks_and_nothing_else() -> None:
    cache = make_cache()
    first, *others = copies = [make_request(range(10)) for _ in range(4)]
    for request in copies:
        assert cache.admit(request, reserve=0)
        compute(cache, request)
    assert all(blocks_of(cache, other)[:2] == blocks_of(cache, first)[:2] for other in others)
    assert len({blocks_of(cache, request)[2] for request in copies}) == 4
    assert cache.num_free_blocks == 16 - 2 - 4
    cache.check_integrity(copies)
    for request in copies:
        cache.free(request)
        assert (request.num_slots, request.num_computed_tokens) == (0, 0)
    assert cache.num_free_blocks == 16
    cache.check_integrity([])


def test_a_prefix_is_shared_up_to_the_block_where_it_ends() -> None:
    cache = make_cache()
    blocks = run_once(cache, range(12))
    request = make_request([*range(6), 99, *range(7, 12)])
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == 4
    first, *others = blocks_of(cache, request)
    assert first == blocks[0]
    assert blocks[0] not in others


def test_what_two_requests_compute_at_once_is_registered_once() -> None:
    cache = make_cache()
    first, second = make_request(range(9)), make_request(range(9))
    assert cache.admit(first, reserve=0)
    assert cache.admit(second, reserve=0)
    assert not set(blocks_of(cache, first)) & set(blocks_of(cache, second))
    compute(cache, second)
    compute(cache, first)
    third = make_request(range(9))
    assert cache.admit(third, reserve=0)
    assert blocks_of(cache, third)[:2] == blocks_of(cache, second)[:2]
    cache.check_integrity([first, second, third])
    for request in (second, third, first):
        cache.free(request)
    cache.check_integrity([])


def test_blocks_are_found_once_they_are_computed() -> None:
    cache = make_cache()
    request = make_request(range(12))
    assert cache.admit(request, reserve=0)
    for num_computed, num_cached in [(3, 0), (4, 4), (7, 4), (11, 8)]:
        request.num_computed_tokens = num_computed
        cache.register(request)
        reader = make_request(range(12))
        assert cache.admit(reader, reserve=0)
        assert reader.num_computed_tokens == num_cached
        cache.free(reader)


def test_unregistered_blocks_are_not_found() -> None:
    cache = make_cache()
    request = make_request(range(12))
    assert cache.admit(request, reserve=0)
    compute(cache, request)
    (registered,) = cache.take_registered()
    assert registered == blocks_of(cache, request)
    assert cache.take_registered() == [[]]
    cache.unregister([registered[1:]])
    cache.free(request)
    reader = make_request(range(12))
    assert cache.admit(reader, reserve=0)
    assert reader.num_computed_tokens == 4
    cache.check_integrity([reader])


def test_the_tail_is_evicted_first() -> None:
    cache = make_cache(4)
    run_once(cache, range(16))
    run_once(cache, range(100, 108))
    request = make_request(range(15))
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == 8


def test_growing_gives_new_blocks_only_when_the_last_one_is_full() -> None:
    cache = make_cache()
    request = make_request(range(3))
    assert cache.admit(request, reserve=0)
    request.num_computed_tokens = 3
    assert cache.allocate(request, 1) == ()
    (new,) = cache.allocate(request, 6) or [()]
    assert len(new) == 2
    assert blocks_of(cache, request)[1:] == list(new)


def test_growing_is_all_or_nothing() -> None:
    cache = make_cache(3)
    request = make_request(range(4))
    assert cache.admit(request, reserve=0)
    request.num_computed_tokens = 4
    assert cache.allocate(request, 12) is None
    assert len(blocks_of(cache, request)) == 1
    assert cache.num_free_blocks == 2
    (new,) = cache.allocate(request, 8) or [()]
    assert len(new) == 2


def test_cached_blocks_that_are_free_do_not_count_twice() -> None:
    cache = make_cache(4)
    run_once(cache, range(8))
    held = make_request(range(50, 54))
    assert cache.admit(held, reserve=0)
    # 3 blocks are free, the 2 cached ones among them, so 4 blocks cannot be had even though only 2 are missing.
    request = make_request(range(16))
    assert not cache.admit(request, reserve=0)
    cache.check_integrity([held])
    assert cache.admit(make_request(range(12)), reserve=0)


def test_the_reserve_stays_free() -> None:
    cache = make_cache(4)
    assert not cache.admit(make_request(range(12)), reserve=2)
    assert cache.admit(make_request(range(12)), reserve=1)
    assert cache.num_free_blocks == 1


def test_a_prompt_is_computed_as_long_as_its_tokens_yield_something_themselves() -> None:
    cache = make_cache()
    run_once(cache, range(12))
    request = make_request(range(12))
    for computes_every_token, num_cached in [(True, 0), (True, 0), (False, 8)]:
        request.computes_every_token = computes_every_token
        assert cache.admit(request, reserve=0)
        assert request.num_computed_tokens == num_cached
        cache.free(request)


def test_only_first_admissions_that_look_count_for_the_hit_rate() -> None:
    cache = make_cache()
    run_once(cache, range(10))
    assert (cache.prefix_queries, cache.prefix_hits) == (10, 0)
    request = make_request(range(10))
    for _ in range(2):
        assert cache.admit(request, reserve=0)
        cache.free(request)
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)
    assert not cache.admit(make_request(range(200)), reserve=0)
    owing = make_request(range(10))
    owing.computes_every_token = True
    assert cache.admit(owing, reserve=0)
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)


def test_of_a_request_that_goes_on_its_prompt_alone_counts() -> None:
    """Tokens that another core has generated for the request may be cached too, but do not count as prompt tokens."""
    cache = make_cache()
    run_once(cache, range(16))
    begun = EngineRequest("r", tuple(range(6)), SamplingParams(), output_token_ids=tuple(range(6, 15)))
    request = Request.of(begun, order=(0, 0), max_total_tokens=1000)
    assert cache.admit(request, reserve=0)
    assert (request.num_computed_tokens, request.num_cached_tokens) == (12, 6)
    assert (cache.prefix_queries, cache.prefix_hits) == (16 + 6, 6)


def test_nothing_is_shared_when_prefix_caching_is_off() -> None:
    cache = make_cache(enable_prefix_caching=False)
    run_once(cache, range(12))
    request = make_request(range(12))
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == 0
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_a_request_has_the_slots_of_the_smallest_group() -> None:
    groups = [BlockGroup(6, 4), BlockGroup(20, 1), BlockGroup(4, 8)]
    assert KVCacheManager(groups, enable_prefix_caching=True).num_slots == 20
    cache = KVCacheManager(groups[:2], enable_prefix_caching=True)
    assert (cache.num_slots, cache.num_blocks, cache.num_free_blocks) == (20, 26, 26)
    request = make_request(range(6))
    assert cache.admit(request, reserve=0)
    assert (request.num_slots, request.next_block_end) == (6, 1)
    request.num_computed_tokens = 6
    cache.register(request)
    assert request.next_block_end == 7
    assert cache.allocate(request, 1) == ((), (6,))
    assert (request.num_slots, cache.num_free_blocks) == (7, 26 - 2 - 7)
    assert cache.take_registered() == [[0], [0, 1, 2, 3, 4, 5]]
    assert KVCacheManager([], enable_prefix_caching=False).num_slots == NO_CACHE


class Findable(BlockGroup):
    """Keeps places of its own. found: of the group, when a request took its share."""

    def __init__(self, group: BlockGroup) -> None:
        super().__init__(16, BLOCK_SIZE)
        self._group, self.found = group, 0

    def take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        self.found = self._group.longest_prefix(request, num_tokens)
        super().take(request, num_tokens, num_cached)


def test_what_others_keep_is_found_with_the_blocks_and_taken_before_them() -> None:
    group = BlockGroup(3, BLOCK_SIZE)
    other = Findable(group)
    cache = KVCacheManager([group], [RequestRows(1), other], enable_prefix_caching=True)
    request = make_request(range(9))
    for found, num_cached, registering in ((0, 0, [group]), (8, 0, [group, other]), (8, 8, [])):
        assert cache.admit(request, reserve=0)
        assert (other.found, request.num_computed_tokens) == (found, num_cached)
        for each in registering:
            each.register(request, 8)
        assert [len(places) for places in cache.take_registered()] == [
            2 * (each in registering) for each in (group, other)
        ]
        cache.free(request)
    cache.reset_prefix_cache()
    assert other.longest_prefix(request, 8) == group.longest_prefix(request, 8) == 0
    assert cache.admit(request, reserve=0)
    group.register(request, 8)
    other.register(request, 8)
    cache.unregister(cache.take_registered())
    assert other.longest_prefix(request, 8) == group.longest_prefix(request, 8) == 0


def test_the_integrity_check_finds_a_request_that_was_not_freed() -> None:
    cache = make_cache()
    request = make_request(range(4))
    assert cache.admit(request, reserve=0)
    with pytest.raises(RuntimeError, match=r"requests \['r'\] hold blocks"):
        cache.check_integrity([])
    request.num_computed_tokens = 5
    with pytest.raises(RuntimeError, match="'r' has 5 tokens computed, but 1 blocks of 4"):
        cache.check_integrity([request])


def test_what_is_given_back_twice_is_an_error() -> None:
    for cache, message in ((make_cache(), "gives back its blocks"), (several_resources(), "gives back a row")):
        request = make_request(range(4))
        assert cache.admit(request, reserve=0)
        cache.free(request)
        with pytest.raises(RuntimeError, match=f"'r' {message}, but has none"):
            cache.free(request)


def several_resources(num_rows: int = 3, num_blocks: tuple[int, int] = (12, 9)) -> KVCacheManager:
    """Two KV groups whose blocks end at different tokens, and rows."""
    groups = [BlockGroup(count, size) for count, size in zip(num_blocks, (2, 3), strict=True)]
    return KVCacheManager(groups, [RequestRows(num_rows)], enable_prefix_caching=True)


def test_groups_share_the_prefix_that_all_of_them_have() -> None:
    cache = several_resources()
    run_once_of(cache, range(10))
    for num_tokens, num_cached in ((6, 0), (7, 6), (9, 6), (10, 6), (11, 6)):
        request = make_request(range(num_tokens))
        assert cache.admit(request, reserve=0)
        assert request.num_computed_tokens == num_cached
        assert [len(blocks) for blocks in cache.block_ids(request)] == [-(-num_tokens // 2), -(-num_tokens // 3)]
        cache.free(request)


def run_once_of(cache: KVCacheManager, tokens: Sequence[int]) -> None:
    request = make_request(tokens)
    assert cache.admit(request, reserve=0)
    compute(cache, request)
    cache.free(request)


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, (12, 9)), (3, (6, 9)), (3, (12, 4))])
def test_what_one_resource_lacks_is_taken_from_none(num_rows: int, num_blocks: tuple[int, int]) -> None:
    cache = several_resources(num_rows, num_blocks)
    first, second = make_request(range(7)), make_request(range(20, 27))
    assert cache.admit(first, reserve=0)
    free = cache.num_free_blocks
    assert not cache.admit(second, reserve=0)
    assert cache.num_free_blocks == free
    cache.check_integrity([first])
    cache.free(first)
    assert cache.admit(second, reserve=0)


@pytest.mark.parametrize("missing", ["a row", "blocks"])
def test_a_resource_that_was_not_freed_is_found(missing: str) -> None:
    cache = several_resources()
    request = make_request(range(4))
    assert cache.admit(request, reserve=0)
    for resource in cache.resources:
        if isinstance(resource, RequestRows) != (missing == "a row"):
            resource.free(request)
    with pytest.raises(RuntimeError, match="no request is left, but"):
        cache.check_all_free()
    with pytest.raises(RuntimeError, match=rf"requests \['r'\] hold {missing}"):
        cache.check_integrity([])


class ResourcesMachine(RuleBasedStateMachine):
    """Requests come, grow, compute and go over all kinds of resources; each group's slots know what was written.

    Only what was written is ever read: a shared prefix holds the same tokens in every group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = several_resources()
        self.running: list[Request] = []
        self.slots: list[dict[tuple[int, int], tuple[int, ...]]] = [{}, {}]

    @initialize(num_rows=st.integers(1, 4), num_blocks=st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def start(self, num_rows: int, num_blocks: tuple[int, int]) -> None:
        self.cache = several_resources(num_rows, num_blocks)

    def slots_of(self, request: Request, positions: range) -> Iterator[tuple[int, tuple[int, int], tuple[int, ...]]]:
        for number, (group, blocks) in enumerate(zip(self.cache.groups, self.cache.block_ids(request), strict=True)):
            for position in positions:
                index, offset = divmod(position, group.block_size)
                yield number, (blocks[index], offset), tuple(request.token_ids[: position + 1])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), reserve=st.integers(0, 2))
    def admit(self, tokens: list[int], reserve: int) -> None:
        request = make_request(tokens)
        before = [group.pool.num_free for group in self.cache.groups]
        if not self.cache.admit(request, reserve):
            assert [group.pool.num_free for group in self.cache.groups] == before
            return
        self.running.append(request)
        assert request.num_computed_tokens < len(tokens) <= request.num_slots
        assert all(group.pool.num_free >= reserve for group in self.cache.groups)
        for number, slot, prefix in self.slots_of(request, range(request.num_computed_tokens)):
            assert self.slots[number][slot] == prefix

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Some of the tokens that are known, and one that is made up for them."""
        request = data.draw(st.sampled_from(self.running))
        count = min(count, len(request.token_ids) - request.num_computed_tokens)
        before = self.cache.block_ids(request)
        new = self.cache.allocate(request, count)
        if new is None:
            assert self.cache.block_ids(request) == before
            return
        if new:
            assert self.cache.block_ids(request) == tuple(a + b for a, b in zip(before, new, strict=True))
        start = request.num_computed_tokens
        request.num_computed_tokens = start + count
        for number, slot, prefix in self.slots_of(request, range(start, start + count)):
            self.slots[number][slot] = prefix
        if request.num_computed_tokens == len(request.token_ids):
            request.token_ids.append(data.draw(st.integers(0, 1)))
        if request.num_computed_tokens >= request.next_block_end:
            self.cache.register(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.cache.free(request)
        with pytest.raises(RuntimeError, match="gives back"):
            self.cache.free(request)

    @rule(lost=st.booleans())
    def forget(self, lost: bool) -> None:
        """Unregister the blocks that were registered last, like a failed step does; or all blocks."""
        registered = self.cache.take_registered()
        if lost:
            self.cache.unregister(registered)

    @rule()
    def reset(self) -> None:
        self.cache.reset_prefix_cache()

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.cache.check_integrity(self.running)

    def teardown(self) -> None:
        for request in self.running:
            self.cache.free(request)
        self.cache.check_all_free()
        self.cache.check_integrity([])


ResourcesMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestResourcesMachine = ResourcesMachine.TestCase
