"""What can never be scheduled: limits that leave no room for a step, and requests that do not fit."""

from __future__ import annotations

from compiled_engine.config import POLICIES, SchedulerConfig
from compiled_engine.messages import EngineRequest
from compiled_engine.scheduling.kv_cache_manager import KVCacheManager


def check_limits(limits: SchedulerConfig, steps_in_flight: int) -> None:
    """Raise ValueError unless a scheduler can work within these limits."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(limits, name)}")
    if limits.policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {limits.policy!r}")
    if steps_in_flight not in (1, 2):
        raise ValueError(f"steps_in_flight must be 1 or 2, got {steps_in_flight}")


def check_fits(request: EngineRequest, max_model_len: int, kv_cache: KVCacheManager) -> None:
    """Raise ValueError if the request can never be computed: empty, or too long for the model or the cache."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise ValueError(f"prompt_token_ids of request {request.request_id!r} must not be empty")
    name = f"request {request.request_id!r}"
    if num_tokens + 1 > max_model_len:
        raise ValueError(
            f"{name} needs {num_tokens + 1} tokens ({num_tokens} of prompt + 1), but max_model_len is {max_model_len}"
        )
    # The last token of a request is never computed, so it needs no slot.
    if num_tokens > kv_cache.num_slots:
        raise ValueError(
            f"{name} has a prompt of {num_tokens} tokens, but the KV cache holds {kv_cache.num_slots} "
            f"({kv_cache.pool.num_blocks} blocks of {kv_cache.block_size})"
        )
