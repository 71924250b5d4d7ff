"""The inputs of one step without an engine around it: a batch of decodes, or one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_engine.attention.inputs import ForwardArguments, arguments_of, attention_inputs_of, step_of
from compiled_engine.config import EngineConfig
from compiled_engine.runner.kv_cache import allocate


@dataclass(frozen=True)
class StepInputs:
    """`arguments` of a forward; `logits_rows_R`, int64 [R]: the tokens that sample; the sampler's inputs, all [R]."""

    arguments: ForwardArguments
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
    table_RB = torch.randperm(num_requests * blocks_per_request, generator=generator)
    table_RB = table_RB.view(num_requests, blocks_per_request)
    ids_T = torch.randint(config.model.vocab_size, (num_tokens,), generator=generator).tolist()
    spans = [range(context - 1, context)] * num_tokens if decodes else [range(num_tokens)]
    step = step_of(ids_T, spans, table_RB.tolist(), block_size, device)
    step["attention_inputs.host_3"][2] = config.model.max_model_len
    kv_caches = allocate(config, num_requests * blocks_per_request)
    for cache in kv_caches:
        cache.normal_()
    return StepInputs(
        arguments=arguments_of(step, attention_inputs_of(step, config.attention_backend), kv_caches),
        logits_rows_R=step["attention_inputs.query_start_loc_R1"][1:].long() - 1,
        zeros_R=torch.zeros(num_requests, device=device),
        seeds_R=torch.zeros(num_requests, dtype=torch.int64, device=device),
        row_index_R=torch.arange(num_requests, dtype=torch.int32, device=device),
    )
