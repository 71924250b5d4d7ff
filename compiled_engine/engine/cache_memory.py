"""Decides how many blocks the KV cache has, and allocates its tensors."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.rank_memory import Memory
from compiled_engine.models.checkpoint.parameters import InsufficientMemoryError
from compiled_engine.parallel.rank_share import local_model

GIB = 1 << 30
CPU_LIMIT_BYTES = 4 * GIB


@dataclass(frozen=True)
class CacheSize:
    """The number of KV cache blocks, and the sizes in bytes from which it was computed."""

    num_blocks: int
    block_bytes: int
    # gpu_memory_utilization's share of the device, less weights, CUDA context and other processes; None without CUDA.
    left_bytes: int | None
    activation_bytes: int  # measured peak memory of a step, weights excluded
    graph_bytes: int  # predicted memory of CUDA graphs

    def metrics(self, graph_bytes_used: int) -> dict[str, int | None]:
        """Return two metrics in bytes: the cache's size, and the memory that would be available for it.

        The available memory is computed with graph_bytes_used, the actual memory of the CUDA graphs, instead of the
        predicted one. It is None without CUDA.
        """
        room = None if self.left_bytes is None else self.left_bytes - self.activation_bytes - graph_bytes_used
        return {"kv_cache_bytes": self.num_blocks * self.block_bytes, "kv_cache_room_bytes": room}


def size_cache(
    config: EngineConfig, activation_bytes: int, graph_bytes: int, reserved_bytes: int, layers: range | None = None
) -> CacheSize:
    """Decide how many blocks the KV cache has: the option num_blocks if it is set, else as many as the memory allows.

    Returns the number with the sizes that led to it. On a CPU, the cache gets at most CPU_LIMIT_BYTES, half of the free
    memory, and `blocks_wanted` blocks. An encoder gets no blocks.

    reserved_bytes: memory to leave free for later allocations. layers: see block_bytes. Other arguments: see CacheSize.

    Raises InsufficientMemoryError if num_blocks is set and the device lacks the memory for so many blocks, or if it is
    not set and a request of max_model_len tokens does not fit. A num_blocks too small for such a request is allowed;
    requests that cannot fit are then refused one by one.
    """
    size = block_bytes(config, layers)
    left = bytes_left(config)
    if not size:  # an encoder
        return CacheSize(0, 0, left, activation_bytes, graph_bytes)
    if left is not None:
        free, _ = _free_and_total(config.device)
        available = left - activation_bytes - graph_bytes - reserved_bytes
        count = available // size
    else:
        free = psutil.virtual_memory().available
        available = min(CPU_LIMIT_BYTES, free // 2)
        count = min(available // size, blocks_wanted(config))
    given = config.cache.num_blocks
    if given is not None:
        if given * size > free:
            raise InsufficientMemoryError(
                f"num_blocks is {given}, which take {given * size / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; "
                f"allowed: at most {free // size}"
            )
        return CacheSize(given, size, left, activation_bytes, graph_bytes)
    needed = -(-config.scheduler.max_model_len // config.cache.block_size)
    if count < needed:
        raise InsufficientMemoryError(
            f"max_model_len={config.scheduler.max_model_len} needs {needed} KV cache blocks of "
            f"{size / (1 << 20):.1f} MiB, but only {max(0, count)} fit into the "
            f"{max(0, available) / GIB:.2f} GiB left; "
            f"lower max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization "
            f"(now {config.cache.gpu_memory_utilization})"
        )
    return CacheSize(count, size, left, activation_bytes, graph_bytes)


def allocate(
    config: EngineConfig, num_blocks: int, layers: range | None = None, memory: Memory | None = None
) -> list[torch.Tensor]:
    """Return a new KV cache: for each layer zeros [num_blocks, 2, block_size, num_kv_heads, head_dim].

    Layers that share keys and values have the same tensor. The last dimension may include a scale, see kv_format. On a
    CPU, blocks take memory only once they are used. layers: the layers to allocate for; None: all. memory: see
    RankMemory.kv_cache.
    """
    shapes, dtype = _shapes(config, num_blocks, layers), config.cache_dtype
    caches = {}
    for layer in _own_caches(config, shapes):
        size = math.prod(shapes[layer]) * dtype.itemsize
        if memory is not None:
            caches[layer] = memory.allocate(size).zero_().view(dtype).view(shapes[layer])
        elif config.device.type != "cpu":
            caches[layer] = torch.zeros(shapes[layer], dtype=dtype, device=config.device)
        else:
            caches[layer] = _untouched(size).view(dtype).view(shapes[layer])
    return [caches[config.model.kv_layer(layer)] for layer in shapes]


def block_bytes(config: EngineConfig, layers: range | None = None) -> int:
    """Return the bytes of one block: the keys and values of all layers, with their scales.

    Keys and values that layers share count once. The blocks of the models that run beside the engine's model
    (config.further_models) are included. layers: the layers of the engine's model to count; None: all.
    """
    shapes = _shapes(config, 1, layers)
    elements = sum(math.prod(shapes[layer]) for layer in _own_caches(config, shapes))
    return elements * config.cache_dtype.itemsize + sum(map(block_bytes, config.further_models))


def blocks_wanted(config: EngineConfig) -> int:
    """Return the number of blocks with which config.max_running requests can all reach max_model_len.

    More blocks only help the prefix cache.
    """
    per_request = -(-config.scheduler.max_model_len // config.cache.block_size)
    return per_request * config.max_running


def bytes_left(config: EngineConfig) -> int | None:
    """Return the free bytes within the part of the GPU's memory that gpu_memory_utilization allows; None without CUDA.

    Negative if more than this part is in use.
    """
    if config.device.type != "cuda":
        return None
    free, total = _free_and_total(config.device)
    return int(total * config.cache.gpu_memory_utilization) - (total - free)


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of a GPU's memory. Memory that PyTorch's allocator keeps unused counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _untouched(size: int) -> torch.Tensor:
    """Return zeros, uint8 [size], in memory that the system provides page by page at first use.

    torch.zeros would use all pages at once, since it writes them.
    """
    if not size:  # a layer without attention
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _shapes(config: EngineConfig, num_blocks: int, layers: range | None) -> dict[int, tuple[int, int, int, int, int]]:
    """Return the shape of the KV cache that each layer reads, by layer index; an empty dict for an encoder.

    layers: the layers to return; None: all.
    """
    shapes = dict(enumerate(local_model(config).kv_shapes(num_blocks, config.cache.block_size, config.cache_dtype)))
    return {layer: shape for layer, shape in shapes.items() if layers is None or layer in layers}


def _own_caches(config: EngineConfig, layers: Iterable[int]) -> list[int]:
    """Return those of `layers` that have a KV cache of their own, and do not read that of another layer."""
    return [layer for layer in layers if config.model.kv_layer(layer) == layer]
