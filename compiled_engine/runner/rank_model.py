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
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.models.checkpoint.rank_shards import share_of
from compiled_engine.parallel.eager_model import add_collectives
from compiled_engine.parallel.stages import Stage, logits_parameters
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
    config: EngineConfig, compiled: CompiledModel | None, group: Group, stage: Stage, progress: Progress
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with its weights on the device, and every parameter and buffer by name, packed ones included.

    Without `compiled` it is to run eagerly. Parameters of other stages stay on the meta device. Raises what materialize
    and load_weights raise.
    """
    cache_dir = config.compile.cache_dir
    model = build_tensors(config.local_model, cache_dir) if compiled else build_model(config.local_model)
    wanted = None
    if stage.count > 1 and compiled is not None:
        wanted = compiled.parameters()
        if stage.is_last:
            wanted |= logits_parameters(model, config.model.hidden_size, config.model.dtype)
    parameters = materialize(model, compiled.packed if compiled else {}, config.device, wanted)
    share = share_of(config, group.rank)
    load_weights(model, config.model, progress, share, cache_dir)
    if compiled is None:
        add_collectives(model, share.shards)
    # One compile range may take a parameter alone that another takes packed: the model's own are views.
    own = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
    return model, own | parameters
