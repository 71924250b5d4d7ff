"""The events of the prefix cache as subscribers decode them: msgpack maps with vLLM's names and fields.

An event's map has its name in the field `type`; fields with a default are left out while they have it. The source of
the format is vLLM, `vllm.distributed.kv_events`.
"""

from __future__ import annotations

import msgspec

GPU = "GPU"
"""The medium of blocks in the KV cache, whatever the device: routers know the first tier by this name."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of a prefix were added to the prefix cache: they can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # the block before the first; None: the first is a prompt's first
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # For each block, the keys that its hash covers besides token ids; None if no block has any.
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks were removed from the prefix cache: they cannot be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """All blocks were removed from the prefix cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, omit_defaults=True, gc=False):
    """Events in the order in which they happened."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None


def short_hash(block_hash: bytes) -> int:
    """Return the last 64 bits of a block's hash, by which events name the block."""
    return int.from_bytes(block_hash[-8:], "big")
