"""Example inputs of a trace: parameters without storage, and small inputs whose values are not read."""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.attention.inputs import STEP_TENSORS, kv_cache_tensors, padding_of
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.trace import ForwardInputs
from compiled_engine.passes.registry import step_tensors


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
    sizes = {"tokens": 12, "requests": 3, "request_borders": 4, "blocks_per_request": 2, "work": 2, "blocks": 5}
    model = config.local_model
    caches = kv_cache_tensors(model.kv_shapes(sizes["blocks"], config.cache.block_size), model.dtype)
    declared = (*STEP_TENSORS, *caches)
    return ForwardInputs(
        declared,
        padding_of(declared, sizes, config.device),
        config.attention_backend,
        # The declared range must hold the example, also where a step may have fewer tokens.
        max_tokens=max(sizes["tokens"], config.scheduler.max_num_batched_tokens),
        asked=step_tensors(config.compile.passes),
    )
