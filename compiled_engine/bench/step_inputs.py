"""The inputs of one step without an engine around it: a batch of decodes, or one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig
from compiled_engine.runner.kv_cache import allocate


@dataclass(frozen=True)
class StepInputs:
    """`arguments` of a forward; `logits_rows_R`, int64 [R]: the tokens that sample; the sampler's inputs, all [R]."""

    arguments: tuple[Any, ...]
    logits_rows_R: torch.Tensor
    zeros_R: torch.Tensor
    seeds_R: torch.Tensor
    row_index_R: torch.Tensor


def make_step_inputs(config: EngineConfig, num_tokens: int, context: int, decodes: bool) -> StepInputs:
    """num_tokens requests that decode their token number `context`, or one prompt of num_tokens tokens."""
    device, block_size = config.device, config.cache.block_size
    num_requests = num_tokens if decodes else 1
    seq_len = context if decodes else num_tokens
    blocks_per_request = -(-seq_len // block_size)
    generator = torch.Generator(device="cpu").manual_seed(0)
    table_RB = torch.randperm(num_requests * blocks_per_request, generator=generator).int()
    table_RB = table_RB.view(num_requests, blocks_per_request)
    positions_T = torch.full((num_tokens,), context - 1) if decodes else torch.arange(num_tokens)
    rows_T = torch.arange(num_tokens) if decodes else torch.zeros(num_tokens, dtype=torch.int64)
    slots_T = table_RB[rows_T, positions_T // block_size].long() * block_size + positions_T % block_size
    starts_R1 = torch.arange(num_requests + 1) if decodes else torch.tensor([0, num_tokens])
    attention_inputs = AttentionInputs(
        query_start_loc_R1=starts_R1.int().to(device),
        seq_lens_R=torch.full((num_requests,), seq_len, dtype=torch.int32, device=device),
        block_table_RB=table_RB.to(device),
        slot_mapping_T=slots_T.to(device),
        host_3=torch.tensor(
            [num_tokens if decodes or num_tokens == 1 else 0, 1 if decodes else num_tokens, config.model.max_model_len],
            dtype=torch.int32,
        ),
        backend=config.attention_backend,
    )
    token_ids_T = torch.randint(config.model.vocab_size, (num_tokens,), generator=generator)
    kv_caches = allocate(config, num_requests * blocks_per_request)
    for cache in kv_caches:
        cache.normal_()
    return StepInputs(
        arguments=(token_ids_T.to(device), positions_T.to(device), attention_inputs, kv_caches),
        logits_rows_R=(starts_R1[1:] - 1).to(device),
        zeros_R=torch.zeros(num_requests, device=device),
        seeds_R=torch.zeros(num_requests, dtype=torch.int64, device=device),
        row_index_R=torch.arange(num_requests, dtype=torch.int32, device=device),
    )
