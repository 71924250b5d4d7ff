"""The types and the ranges of a user's options, where no other option plays a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_engine.config import POLICIES
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.folders import check_folders
from compiled_engine.resolve.logits_processors import resolve_logits_processors

COLLECTIVES = ("auto", "nccl")
EXECUTORS = ("auto", "in_process", "multiprocess", "ray")
MODES = ("auto", "eager", "compiled", "graphed")
# Sizes beyond these are mistakes; a grid of CUDA has room for 65,535 requests, a block table's entry 31 bits.
MOST = {
    "max_model_len": 1 << 24,
    "max_num_seqs": 65535,
    "max_num_batched_tokens": 1 << 20,
    "max_prefill_tokens": 1 << 20,
    "num_blocks": 2**31 - 1,
    "tensor_parallel_size": 1024,
    "pipeline_parallel_size": 16,
    "data_parallel_size": 1024,
}


def check_types(options: EngineOptions) -> None:
    """Raise TypeError or ValueError naming the field, the value and what is allowed."""
    for name, most in MOST.items():
        if (value := getattr(options, name)) is not None:
            require_integer(name, value, most=most)
    require_integer("seed", options.seed, -(2**63), 2**64 - 1)
    switches = ("enable_prefix_caching", "compile_cache", "strict_passes", "verify_passes", "background_capture")
    for name in (*switches, "skip_tokenizer_init", "sequence_parallel"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} is {getattr(options, name)!r}; allowed: True or False")
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"gpu_memory_utilization is {share!r}; allowed: a number above 0 and at most 1")
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization is {share!r}; allowed: above 0 and at most 1")
    require_one_of("mode", options.mode, MODES)
    require_one_of("distributed_executor", options.distributed_executor, EXECUTORS)
    require_one_of("collectives", options.collectives, COLLECTIVES)
    require_one_of("scheduling_policy", options.scheduling_policy, POLICIES)
    require_one_of("generation_config", options.generation_config, ("auto", "none"))
    lists = ("passes", "disable_passes", "compile_ranges", "capture_sizes", "capture_token_sizes", "logits_processors")
    for name in lists:
        value = getattr(options, name)
        if not isinstance(value, tuple) and (value is not None or name == "disable_passes"):
            raise TypeError(f"{name} is {value!r}; allowed: a list")
    resolve_logits_processors(options.logits_processors)  # objects, which are no part of the configuration
    if not isinstance(options.profile_dir, str | Path) or options.profile_dir == "":
        raise TypeError(f"profile_dir is {options.profile_dir!r}; allowed: the path of a folder")
    check_folders(options)


def require_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


def require_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
