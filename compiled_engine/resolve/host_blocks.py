"""Resolve the host memory and the files for blocks of the prefix cache, or raise an error that says what is allowed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil

from compiled_engine.config import BlockFilesConfig, CacheConfig, EngineConfig, flat_fields, json_value
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.recurrences import snapshot_bytes
from compiled_engine.schema import require_defaults

GIB = 1 << 30
NAMES = ("kv_offloading_size", "kv_offloading_folder", "kv_offloading_folder_size")
# Subfolder of the user's folder. The number changes when the files' format or meaning changes.
SUBFOLDER = "compiled_engine_blocks_2"
# Fields of a model that are not part of the digest: where it comes from (its files are part of the digest), and limits.
_OF_ORIGIN = ("model.path", "model.hub_name", "model.revision", "model.merged_adapter")
_OF_LIMITS = ("model.max_model_len", "model.recurrences.num_rows", "model.recurrences.num_snapshots")


def resolve_host_blocks(options: EngineOptions, config: EngineConfig) -> CacheConfig:
    """Return the cache's configuration with the numbers of blocks that fit into host memory and into files.

    The options kv_offloading_size and kv_offloading_folder_size limit them. Without kv_offloading_size, config.cache is
    returned unchanged. Adds reasons to `config.reasons`. Raises ValueError with the option, its value and what is
    allowed.
    """
    size = options.kv_offloading_size
    if not size:
        reason = "without kv_offloading_size there are no blocks in host memory, from where files are written"
        require_defaults(options, reason, *NAMES[1:])
        return config.cache
    if not config.cache.enable_prefix_caching:
        require_defaults(options, "there is no prefix cache", *NAMES)
    if config.further_models:
        reason = "a model or a head drafts, whose KV cache stays on the device"
        require_defaults(options, reason, *NAMES)
    num_ranks = config.parallel.tensor_parallel_size
    of_block = block_bytes(config) * num_ranks
    of_state = snapshot_bytes(config.model, num_ranks) * num_ranks
    needed = "a block" if not of_state else "a block and a snapshot of recurrent states"
    free = psutil.virtual_memory().available
    least, most = (of_block + of_state) / GIB, free / GIB
    if not least <= size <= most:
        raise ValueError(
            f"kv_offloading_size is {size} GiB; allowed: from {least:.2g} GiB, {needed}, to the {most:.2f} GiB of host "
            "memory that are free"
        )
    num_blocks, num_states = _divided(int(size * GIB), of_block, of_state)
    reason = f"kv_offloading_size is {size} GiB, and a block has {of_block:,} bytes"
    config.reasons["cache.host_blocks"] = reason
    if num_states:
        config.reasons["cache.host_states"] = f"{reason}, a snapshot of recurrent states {of_state:,}"
    files = None
    if options.kv_offloading_folder is not None:
        most_bytes = int(options.kv_offloading_folder_size * GIB)
        if most_bytes < of_block + of_state:
            raise ValueError(
                f"kv_offloading_folder_size is {options.kv_offloading_folder_size} GiB; "
                f"allowed: at least {least:.2g} GiB, {needed}"
            )
        given = Path(options.kv_offloading_folder).expanduser()
        # Unlike Path.resolve, realpath accepts links that form a loop. The start reports them.
        folder = Path(os.path.realpath(given)) / SUBFOLDER / digest_of_model(config)
        replicas = config.parallel.data_parallel_size
        weight = max(1, -(-of_state // of_block))
        config.reasons["cache.block_files.limit"] = (
            f"kv_offloading_folder_size is {options.kv_offloading_folder_size} GiB"
        )
        files = BlockFilesConfig(folder, most_bytes // of_block, most_bytes * replicas, weight)
    return replace(config.cache, host_blocks=num_blocks, host_states=num_states, block_files=files)


def _divided(num_bytes: int, of_block: int, of_state: int) -> tuple[int, int]:
    """Return (number of KV cache blocks, number of snapshots of recurrent states) that fit into `num_bytes`.

    of_block, of_state: the bytes of one block and of one snapshot; of_state 0: there are no snapshots. Snapshots get
    half of the bytes, but there are never more snapshots than blocks.
    """
    if not of_state:
        return num_bytes // of_block, 0
    num_states = max(1, min(num_bytes // (2 * of_state), num_bytes // (of_state + of_block)))
    return (num_bytes - num_states * of_state) // of_block, num_states


def digest_of_model(config: EngineConfig) -> str:
    """Return a digest of everything that the keys and values of a block depend on, except the tokens of its prefix.

    Names, sizes and modification times of the checkpoint's files stand for its weights. Links are resolved: for files
    in the hub's cache, the name is then the hash of the contents.
    """
    fields = flat_fields(replace(config, kv_events=None))
    cache, parallel = config.cache, config.parallel
    described = {
        "model": {
            name: json_value(value)
            for name, value in fields.items()
            if name.startswith("model.") and not name.startswith(_OF_ORIGIN + _OF_LIMITS)
        },
        "files": [_files_in(folder) for folder in (config.model.path, config.model.merged_adapter) if folder],
        "layout": [cache.block_size, cache.kv_dtype, parallel.tensor_parallel_size, parallel.stage_layers],
        "device": config.device.type,
        "version": version("compiled-engine"),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def _files_in(folder: Path) -> list[tuple[str, int, int]]:
    paths = sorted(path.resolve() for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
