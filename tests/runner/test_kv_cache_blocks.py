"""How many KV cache blocks there are: as many as asked for, or as the requests can use, if the memory is there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from compiled_engine.config import EngineConfig, HeadShape
from compiled_engine.engine.cache_memory import allocate, block_bytes, size_cache
from compiled_engine.models.checkpoint.parameters import InsufficientMemoryError
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve


def config_of(**options: Any) -> EngineConfig:
    return resolve(EngineOptions(device="cpu", mode="eager", max_model_len=100, block_size=16, **options))


@pytest.mark.parametrize(("options", "count"), [({}, 7), ({"max_num_seqs": 3}, 21), ({"num_blocks": 4}, 4)])
def test_every_request_can_reach_max_model_len(options: dict[str, Any], count: int) -> None:
    assert size_cache(config_of(**{"max_num_seqs": 1} | options), 0, 0, 0).num_blocks == count


@pytest.mark.parametrize(
    ("options", "blocks_free", "message"),
    [
        ({}, 13, "max_model_len=100 needs 7 KV cache blocks of .* but only 6 fit"),
        ({"num_blocks": 14}, 13, "num_blocks is 14, which take .* allowed: at most 13"),
    ],
)
def test_what_does_not_fit_is_an_error(
    options: dict[str, Any], blocks_free: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(**options)
    memory = SimpleNamespace(available=blocks_free * block_bytes(config))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(InsufficientMemoryError, match=message):
        size_cache(config, 0, 0, 0)


def test_on_a_cpu_blocks_take_memory_from_their_first_use_on() -> None:
    process = psutil.Process()
    config = config_of()
    before = process.memory_info().rss
    caches = allocate(config, (1 << 29) // block_bytes(config))
    assert sum(cache.nbytes for cache in caches) > 500 << 20
    assert process.memory_info().rss - before < 50 << 20
    assert all(not cache[:: len(cache) // 8].any() for cache in caches)
    caches[-1][-1] = 1.0
    assert int((caches[-1] != 0).sum()) == caches[-1][-1].numel()


def test_a_block_has_the_bytes_that_it_is_said_to_have() -> None:
    config = config_of()
    assert sum(cache.nbytes for cache in allocate(config, 3)) == 3 * block_bytes(config)
    heads = tuple(HeadShape(4, 1 + layer % 2, 64 << layer % 2) for layer in range(config.model.num_layers))
    mixed = replace(config, model=replace(config.model, layer_heads=heads))
    caches = allocate(mixed, 3)
    assert [cache.shape[3:] for cache in caches] == [(layer.num_kv_heads, layer.head_dim) for layer in heads]
    assert sum(cache.nbytes for cache in caches) == 3 * block_bytes(mixed)
