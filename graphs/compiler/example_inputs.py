"""What a model is traced with: parameters without storage, and small inputs whose values nobody reads."""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.trace import ForwardInputs


def without_storage(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on the meta device its real device but no memory: it can be traced, not executed."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_storageless(parameter, device), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def _storageless(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_like(like, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def example_inputs(config: EngineConfig) -> ForwardInputs:
    """Three requests of four tokens; every size in them is dynamic in the trace."""
    tokens, requests, blocks = 12, 3, 5
    device, model = config.device, config.model
    cache_shapes = model.kv_shapes(blocks, config.cache.block_size)
    attention_inputs = AttentionInputs(
        query_start_loc_R1=torch.zeros(requests + 1, dtype=torch.int32, device=device),
        seq_lens_R=torch.zeros(requests, dtype=torch.int32, device=device),
        block_table_RB=torch.zeros(requests, 2, dtype=torch.int32, device=device),
        slot_mapping_T=torch.zeros(tokens, dtype=torch.int64, device=device),
        host_3=torch.zeros(3, dtype=torch.int32, device="cpu"),
        backend=config.attention_backend,
        work_W=torch.zeros(2, dtype=torch.int32, device=device),
    )
    return ForwardInputs(
        input_ids_T=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions_T=torch.zeros(tokens, dtype=torch.int64, device=device),
        attention_inputs=attention_inputs,
        kv_caches=[torch.zeros(shape, dtype=model.dtype, device=device) for shape in cache_shapes],
        # The declared range must hold the example, also where a step may have fewer tokens.
        max_tokens=max(tokens, config.scheduler.max_num_batched_tokens),
    )
