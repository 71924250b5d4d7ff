"""The model as this rank has it: compiled, built in its shape, with its slices of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from compiled_engine.collectives.group import Group
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiled_model import CompiledModel, compile_model
from compiled_engine.models.checkpoint.build_model import build_model, build_tensors
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.models.checkpoint.rank_shards import shards_of
from compiled_engine.parallel.eager_model import add_collectives
from compiled_engine.passes.parameter import KEPT
from compiled_engine.passes.registry import registered_passes
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline


def compile_in_turn(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    progress: Progress,
    timeline: Timeline,
) -> CompiledModel:
    """See compile_model. The first rank builds what is new to the cache, and has its kernels compiled meanwhile; the
    others load it then. Without a cache each builds it."""
    finds = group.rank > 0 and config.compile.cache_dir is not None
    if finds:
        group.least(1)
    compiled = compile_model(config, model_to_trace, progress, timeline)
    if not finds:
        group.least(1)
    return compiled


def load_model(
    config: EngineConfig, compiled: CompiledModel | None, group: Group, progress: Progress
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with its weights on the device, and every parameter and buffer by name, packed ones included.

    compiled: of this rank's stage; None: the model is to run eagerly. What the compiled model does not take stays on
    the meta device. Raises what materialize and load_weights raise.
    """
    cache_dir, num_ranks = config.compile.cache_dir, config.parallel.tensor_parallel_size
    model = build_tensors(config.local_model, cache_dir) if compiled else build_model(config.local_model)
    shards = {} if compiled else shards_of(config)
    parameters = compiled.parameters if compiled else parameters_of(model, shards)
    weights = materialize(model, parameters, config.device)
    whole = model if num_ranks == 1 else build_tensors(config.model, cache_dir)
    load_weights(weights, whole, config.model, progress, group.rank, num_ranks, cache_dir)
    if not compiled:
        add_collectives(model, shards)
    kept = {parameter.name: weights.tensors[parameter.name] for parameter in parameters if parameter.role == KEPT}
    for graph_pass in registered_passes():
        if kept and graph_pass.name in config.compile.passes:
            graph_pass.keep(kept)
    return model, weights.tensors
