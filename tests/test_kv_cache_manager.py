"""Block tables and prefix caching, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compiled_engine.messages import EngineRequest
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_logprobs import LogprobRows, TokenLogprobs
from compiled_engine.scheduling.kv_cache_manager import KVCacheManager
from compiled_engine.scheduling.request import Request

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 16, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching)


def make_request(tokens: Sequence[int], *, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Request.of(EngineRequest("r", tuple(tokens), params), order=(0, 0), max_total_tokens=1000, vocab_size=11)


def compute(cache: KVCacheManager, request: Request) -> None:
    """Pretend that a step computes all that the request knows."""
    request.num_computed_tokens = len(request.token_ids)
    cache.register(request)


def run_once(cache: KVCacheManager, tokens: Sequence[int]) -> list[int]:
    """Admit, compute and free a request; returns the blocks it had."""
    request = make_request(tokens)
    assert cache.admit(request, reserve=0)
    compute(cache, request)
    blocks = request.block_ids
    cache.free(request)
    return blocks


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        KVCacheManager(4, 0, True)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (15, 12)]
)
def test_a_full_hit_leaves_a_token_to_compute_and_only_full_blocks_count(num_tokens: int, num_cached: int) -> None:
    cache = make_cache()
    run_once(cache, range(num_tokens))
    request = make_request(range(num_tokens))
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == request.num_cached_tokens == num_cached
    assert len(request.block_ids) == -(-num_tokens // BLOCK_SIZE)
    cache.check_integrity([request])


def test_copies_share_full_blocks_and_nothing_else() -> None:
    cache = make_cache()
    first, *others = copies = [make_request(range(10)) for _ in range(4)]
    for request in copies:
        assert cache.admit(request, reserve=0)
        compute(cache, request)
    assert all(other.block_ids[:2] == first.block_ids[:2] for other in others)
    assert len({request.block_ids[2] for request in copies}) == 4
    assert cache.pool.num_free == 16 - 2 - 4
    cache.check_integrity(copies)
    for request in copies:
        cache.free(request)
        assert (request.block_ids, request.num_slots, request.num_computed_tokens) == ([], 0, 0)
    assert cache.pool.num_free == 16
    cache.check_integrity([])


def test_a_prefix_is_shared_up_to_the_block_where_it_ends() -> None:
    cache = make_cache()
    blocks = run_once(cache, range(12))
    request = make_request([*range(6), 99, *range(7, 12)])
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == 4
    assert request.block_ids[0] == blocks[0]
    assert not set(request.block_ids[1:]) & {blocks[0]}


def test_what_two_requests_compute_at_once_is_registered_once() -> None:
    cache = make_cache()
    first, second = make_request(range(9)), make_request(range(9))
    assert cache.admit(first, reserve=0)
    assert cache.admit(second, reserve=0)
    assert not set(first.block_ids) & set(second.block_ids)
    compute(cache, second)
    compute(cache, first)
    third = make_request(range(9))
    assert cache.admit(third, reserve=0)
    assert third.block_ids[:2] == second.block_ids[:2]
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
    registered = cache.take_registered()
    assert registered == request.block_ids
    assert cache.take_registered() == []
    cache.unregister(registered[1:])
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
    new = cache.allocate(request, 6)
    assert new is not None
    assert len(new) == 2
    assert request.block_ids[1:] == list(new)


def test_growing_is_all_or_nothing() -> None:
    cache = make_cache(3)
    request = make_request(range(4))
    assert cache.admit(request, reserve=0)
    request.num_computed_tokens = 4
    assert cache.allocate(request, 12) is None
    assert len(request.block_ids) == 1
    assert cache.pool.num_free == 2
    new = cache.allocate(request, 8)
    assert new is not None
    assert len(new) == 2


def test_cached_blocks_that_are_free_do_not_count_twice() -> None:
    cache = make_cache(4)
    run_once(cache, range(8))
    held = make_request(range(50, 54))
    assert cache.admit(held, reserve=0)
    # 3 blocks are free, the 2 cached ones among them, so 4 blocks cannot be had even though only 2 are missing.
    request = make_request(range(16))
    assert not cache.admit(request, reserve=0)
    assert request.block_ids == []
    cache.check_integrity([held])
    assert cache.admit(make_request(range(12)), reserve=0)


def test_the_reserve_stays_free() -> None:
    cache = make_cache(4)
    assert not cache.admit(make_request(range(12)), reserve=2)
    assert cache.admit(make_request(range(12)), reserve=1)
    assert cache.pool.num_free == 1


def test_a_prompt_is_computed_as_long_as_its_logprobs_are_owed() -> None:
    cache = make_cache()
    run_once(cache, range(12))
    request = make_request(range(12), prompt_logprobs=0)
    entry = TokenLogprobs((0,), (0.0,), 1)
    for delivered, num_cached in [(0, 0), (5, 0), (6, 8)]:
        request.take_prompt_logprobs(request.next_prompt_logprob, LogprobRows.of([entry] * delivered))
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
    assert cache.admit(make_request(range(10), prompt_logprobs=0), reserve=0)
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 8)


def test_nothing_is_shared_when_prefix_caching_is_off() -> None:
    cache = make_cache(enable_prefix_caching=False)
    run_once(cache, range(12))
    request = make_request(range(12))
    assert cache.admit(request, reserve=0)
    assert request.num_computed_tokens == 0
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_the_integrity_check_finds_a_request_that_was_not_freed() -> None:
    cache = make_cache()
    request = make_request(range(4))
    assert cache.admit(request, reserve=0)
    with pytest.raises(RuntimeError, match="block 0 has 1 references, but 0 tables hold it"):
        cache.check_integrity([])
    request.num_computed_tokens = 5
    with pytest.raises(RuntimeError, match="'r' has 5 tokens computed, but 1 blocks of 4"):
        cache.check_integrity([request])
