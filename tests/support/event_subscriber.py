"""A subscriber to KV events, which decodes them by vLLM's description and keeps the blocks that can be found."""

from __future__ import annotations

from typing import Any

import msgspec


class KVCacheEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Subscriber:
    """The blocks that can be found: (parent, tokens, extra keys) by the block's hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], tuple[Any, ...] | None]] = {}

    def receive(self, batch: KVEventBatch) -> None:
        """Apply a batch of events. Asserts that stored blocks are new, and that removed blocks exist."""
        assert batch.events
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                assert event.medium == "GPU"
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
            else:
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        assert (event.medium, event.group_idx) == ("GPU", 0)
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        parent = event.parent_block_hash
        keys = event.extra_keys or [None] * len(event.block_hashes)
        for index, (block_hash, of_block) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert block_hash not in self.blocks
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            self.blocks[block_hash] = (parent, tuple(tokens), of_block)
            parent = block_hash
