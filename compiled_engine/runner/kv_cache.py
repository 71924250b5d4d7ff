"""The number of KV cache blocks, and their tensors."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import psutil
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.models.checkpoint.parameters import InsufficientMemoryError
from compiled_engine.parallel.rank_share import local_model

GIB = 1 << 30
CPU_LIMIT_BYTES = 4 * GIB


@dataclass(frozen=True)
class CacheSize:
    """Sizes in bytes that determine the KV cache.

    left_bytes: gpu_memory_utilization's share of the device, less weights, the CUDA context and other processes; None
    without CUDA. activation_bytes: the measured peak of a step beyond that. graph_bytes: predicted memory of CUDA
    graphs.
    """

    num_blocks: int
    block_bytes: int
    left_bytes: int | None
    activation_bytes: int
    graph_bytes: int

    def metrics(self, graph_bytes_used: int) -> dict[str, int | None]:
        """Return the bytes that the cache takes, and the bytes that were free for it, given the actual size of the
        graphs."""
        room = None if self.left_bytes is None else self.left_bytes - self.activation_bytes - graph_bytes_used
        return {"kv_cache_bytes": self.num_blocks * self.block_bytes, "kv_cache_room_bytes": room}


def block_bytes(config: EngineConfig, layers: range | None = None) -> int:
    """Bytes of one block over these layers, keys and values with their scales; None for all. Those of a draft model are
    counted too."""
    shapes = _shapes(config, 1, layers)
    of_draft = 0 if config.draft is None else block_bytes(config.draft)
    return sum(map(math.prod, shapes)) * config.cache_dtype.itemsize + of_draft


def blocks_wanted(config: EngineConfig) -> int:
    """Blocks that would let all running requests reach max_model_len: more only help the prefix cache."""
    per_request = -(-config.scheduler.max_model_len // config.cache.block_size)
    return per_request * config.max_running


def bytes_left(config: EngineConfig) -> int | None:
    """Return the bytes of gpu_memory_utilization's share of the device that are free; None without CUDA."""
    if config.device.type != "cuda":
        return None
    free, total = _free_and_total(config.device)
    return int(total * config.cache.gpu_memory_utilization) - (total - free)


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU; what the allocator holds idle is free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def size_cache(
    config: EngineConfig, activation_bytes: int, graph_bytes: int, set_aside_bytes: int, layers: range | None = None
) -> CacheSize:
    """Blocks to allocate: the requested number, or what the memory budget allows.

    set_aside_bytes: reserved for later allocations. layers: see block_bytes. Others: see CacheSize.
    Raises InsufficientMemoryError when not even one request of max_model_len tokens fits; a `num_blocks` that the user
    gave may be smaller, since requests that cannot fit are then refused one by one, or larger, as long as the device
    has the memory.
    """
    size = block_bytes(config, layers)
    left = bytes_left(config)
    if not size:  # an encoder
        return CacheSize(0, 0, left, activation_bytes, graph_bytes)
    if left is not None:
        free, _ = _free_and_total(config.device)
        available = left - activation_bytes - graph_bytes - set_aside_bytes
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


def allocate(config: EngineConfig, num_blocks: int, layers: range | None = None) -> list[torch.Tensor]:
    """Allocate a tensor for each of these layers, [num_blocks, 2, block_size, num_kv_heads, head_dim], zeros; in the
    last dimension a scale may be counted, see kv_format.

    On a CPU a block takes memory from its first use on.
    """
    shapes, dtype = _shapes(config, num_blocks, layers), config.cache_dtype
    if config.device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=config.device) for shape in shapes]
    return [_untouched(math.prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in shapes]


def _untouched(size: int) -> torch.Tensor:
    """Zeros, uint8 [size], of pages that the system hands out when they are first used; torch.zeros writes them all."""
    if not size:  # of a layer that does not attend
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _shapes(config: EngineConfig, num_blocks: int, layers: range | None) -> list[tuple[int, int, int, int, int]]:
    shapes = local_model(config).kv_shapes(num_blocks, config.cache.block_size, config.cache_dtype)
    return shapes if layers is None else shapes[layers.start : layers.stop]
