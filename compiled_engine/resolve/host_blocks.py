"""Resolve the host memory for blocks that the KV cache evicts, or raise an error that says what is allowed."""

from __future__ import annotations

import psutil

from compiled_engine.config import EngineConfig
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.options import EngineOptions
from compiled_engine.schema import require_defaults

GIB = 1 << 30


def resolve_host_blocks(options: EngineOptions, config: EngineConfig) -> int:
    """Return the number of blocks that kv_offloading_size holds; 0 if it is not given. The reason is added to config.

    Raises ValueError with the option, its value and what is allowed.
    """
    size = options.kv_offloading_size
    if not size:
        return 0
    if not config.cache.enable_prefix_caching:
        require_defaults(options, "there is no prefix cache", "kv_offloading_size")
    if config.further_models:
        reason = "a model or a head drafts, whose KV cache stays on the device"
        require_defaults(options, reason, "kv_offloading_size")
    of_block, free = block_bytes(config), psutil.virtual_memory().available
    least, most = of_block / GIB, free / GIB
    if not least <= size <= most:
        raise ValueError(
            f"kv_offloading_size is {size} GiB; allowed: from {least:.2g} GiB, a block, to the {most:.2f} GiB of host "
            "memory that are free"
        )
    count = int(size * GIB / of_block)
    config.reasons["cache.host_blocks"] = f"kv_offloading_size is {size} GiB, and a block has {of_block:,} bytes"
    return count
