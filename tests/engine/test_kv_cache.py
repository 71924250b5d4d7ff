"""The KV cache: how many blocks there are, beside graphs and the work of a step, by made-up sizes; and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from plain_config import BASE

from compiled_engine.config import (
    DraftConfig,
    EngineConfig,
    HeadShape,
    ParallelConfig,
    SpeculationConfig,
)
from compiled_engine.engine.cache_memory import CacheSize, allocate, block_bytes, blocks_wanted, bytes_left, size_cache
from compiled_engine.models.checkpoint.parameters import InsufficientMemoryError

# Two layers, keys and values, 16 slots, two heads of 16 elements in float32.
BLOCK = 2 * 2 * 16 * 2 * 16 * 4
ON_GPU = replace(BASE, device=torch.device("cuda", 1))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what a GPU says of its memory, in blocks of the cache."""

    def give(free: int, total: int, reserved: int = 0, allocated: int = 0) -> None:
        for name, blocks in (("memory_reserved", reserved), ("memory_allocated", allocated)):
            monkeypatch.setattr(torch.cuda, name, lambda device, blocks=blocks: blocks * BLOCK)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * BLOCK, total * BLOCK))

    return give


def with_cache(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, cache=replace(config.cache, **changes))


def test_the_bytes_of_a_block() -> None:
    assert block_bytes(BASE) == BLOCK
    assert block_bytes(BASE, range(1, 2)) == block_bytes(BASE, range(0, 1)) == BLOCK // 2
    assert block_bytes(replace(BASE, parallel=ParallelConfig(2, "multiprocess"))) == BLOCK // 2
    assert block_bytes(with_cache(BASE, kv_dtype="fp8_e4m3")) == BLOCK // 4
    assert block_bytes(with_cache(BASE, kv_dtype="int8")) == BLOCK // 4 * 18 // 16
    model = replace(BASE.model, num_layers=1, sliding_windows=(None,))
    draft = DraftConfig(model, BASE.compile, BASE.graph)
    with_draft = replace(BASE, speculation=SpeculationConfig("draft_model", 3, draft=draft))
    assert block_bytes(with_draft) == BLOCK * 3 // 2
    assert block_bytes(with_draft, range(1, 2)) == BLOCK
    assert [cache.shape for cache in allocate(BASE, 3, range(1, 2))] == [(3, 2, 16, 2, 16)]


def test_the_blocks_that_requests_can_use() -> None:
    assert blocks_wanted(BASE) == 8 * 8
    config = replace(BASE, scheduler=replace(BASE.scheduler, max_model_len=129, max_num_seqs=3))
    assert blocks_wanted(config) == 9 * 3
    assert blocks_wanted(replace(config, parallel=ParallelConfig(1, "multiprocess", 1, (1, 1)))) == 9 * 6


def test_the_share_that_is_left(gpu: Callable[..., None]) -> None:
    """The share is of all memory, less the memory of others; the allocator's idle memory counts as free."""
    assert bytes_left(BASE) is None
    gpu(free=60, total=100, reserved=15, allocated=5)
    assert bytes_left(ON_GPU) == (90 - 30) * BLOCK
    assert bytes_left(with_cache(ON_GPU, gpu_memory_utilization=0.5)) == (50 - 30) * BLOCK


def test_blocks_take_what_nothing_else_needs(gpu: Callable[..., None]) -> None:
    gpu(free=70, total=100)
    size = size_cache(ON_GPU, 10 * BLOCK, 7 * BLOCK, 3 * BLOCK)
    assert size == CacheSize(60 - 20, BLOCK, 60 * BLOCK, 10 * BLOCK, 7 * BLOCK)
    assert size.metrics(5 * BLOCK) == {"kv_cache_bytes": 40 * BLOCK, "kv_cache_room_bytes": 45 * BLOCK}
    assert size_cache(ON_GPU, 10 * BLOCK + 1, 0, 0).num_blocks == 49
    with pytest.raises(InsufficientMemoryError, match=r"max_model_len=128 needs 8 KV cache blocks of .* only 7 fit"):
        size_cache(ON_GPU, 53 * BLOCK, 0, 0)
    with pytest.raises(InsufficientMemoryError, match=r"only 0 fit into the 0.00 GiB left"):
        size_cache(ON_GPU, 80 * BLOCK, 0, 0)
    assert size_cache(ON_GPU, 52 * BLOCK, 0, 0).num_blocks == 8


def test_a_number_that_was_asked_for_is_taken_if_it_is_free(gpu: Callable[..., None]) -> None:
    """However little the work of a step then has."""
    gpu(free=70, total=100)
    for num_blocks in (1, 70):
        size = size_cache(with_cache(ON_GPU, num_blocks=num_blocks), 60 * BLOCK, 2, 0)
        assert size == CacheSize(num_blocks, BLOCK, 60 * BLOCK, 60 * BLOCK, 2)
    with pytest.raises(InsufficientMemoryError, match=r"num_blocks is 71, .* allowed: at most 70"):
        size_cache(with_cache(ON_GPU, num_blocks=71), 0, 0, 0)


def test_on_a_cpu_there_are_as_many_as_are_useful_in_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in 4 GiB."""

    def count(config: EngineConfig, free: int) -> int:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        return size_cache(config, 10 * BLOCK, 10 * BLOCK, 10 * BLOCK).num_blocks

    assert [count(BASE, blocks * BLOCK) for blocks in (16, 60, 61, 127, 128, 900)] == [8, 30, 30, 63, 64, 64]
    many = replace(BASE.scheduler, max_num_seqs=65535)
    many_stages = replace(BASE, scheduler=many, parallel=ParallelConfig(1, "multiprocess", 1, (1, 1)))
    assert count(many_stages, 64 << 30) == (4 << 30) // BLOCK
    with pytest.raises(InsufficientMemoryError, match="only 7 fit into"):
        count(BASE, 15 * BLOCK)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_tensors_of_a_cache(device: str) -> None:
    """A layer that does not attend has an empty one."""
    heads = (HeadShape(0, 0, 0), HeadShape(4, 2, 8))
    config = with_cache(BASE, kv_dtype="int8")
    config = replace(config, model=replace(config.model, layer_heads=heads), device=torch.device(device))
    caches = allocate(config, 3)
    assert [cache.shape[:4] for cache in caches] == [(3, 2, 16, 0), (3, 2, 16, 2)]
    assert {(cache.dtype, cache.device.type) for cache in caches} == {(torch.uint8, device)}
    if device == "cpu":
        assert not caches[1].any()


def test_an_encoder_has_no_cache() -> None:
    encoder = replace(BASE, model=replace(BASE.model, causal=False))
    assert size_cache(encoder, 5, 6, 7) == CacheSize(0, 0, None, 5, 6)
    assert size_cache(encoder, 5, 6, 7).metrics(9) == {"kv_cache_bytes": 0, "kv_cache_room_bytes": None}


def test_on_a_cpu_blocks_take_memory_from_their_first_use_on() -> None:
    process = psutil.Process()
    config = BASE
    before = process.memory_info().rss
    caches = allocate(config, (1 << 29) // block_bytes(config))
    assert sum(cache.nbytes for cache in caches) > 500 << 20
    assert process.memory_info().rss - before < 50 << 20
    assert all(not cache[:: len(cache) // 8].any() for cache in caches)
    caches[-1][-1] = 1.0
    assert int((caches[-1] != 0).sum()) == caches[-1][-1].numel()


def test_a_block_has_the_bytes_that_it_is_said_to_have() -> None:
    config = BASE
    assert sum(cache.nbytes for cache in allocate(config, 3)) == 3 * block_bytes(config)
    heads = tuple(HeadShape(4, 1 + layer % 2, 64 << layer % 2) for layer in range(config.model.num_layers))
    mixed = replace(config, model=replace(config.model, layer_heads=heads))
    caches = allocate(mixed, 3)
    assert [cache.shape[3:] for cache in caches] == [(layer.num_kv_heads, layer.head_dim) for layer in heads]
    assert sum(cache.nbytes for cache in caches) == 3 * block_bytes(mixed)
