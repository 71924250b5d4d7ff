"""Loads a rank's EAGLE-3 head, compiled or eager, with its weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.engine import cache_memory
from compiled_engine.engine.forward import ModelForward, compile_in_turn, load_model
from compiled_engine.engine.step_hooks import RunnerParts
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.models.checkpoint.eagle3_folder import EMBEDDING, draft_tokens, has_embedding
from compiled_engine.parallel.rank_share import local_model


def embedding_of(model: nn.Module, config: EngineConfig) -> torch.Tensor | None:
    """Return the embedding of the engine's model, for a head (`config`) without its own; None if the head has one.

    Raises ValueError if no parameter of the model has the right shape.
    """
    head = local_model(config)
    if has_embedding(head):
        return None
    shape = head.vocab_size, head.hidden_size
    found = next((parameter for parameter in model.parameters() if tuple(parameter.shape) == shape), None)
    if found is None:
        raise ValueError(f"{head.path} has no {EMBEDDING}, and the model has none of {list(shape)} that it could use")
    return found.data


@dataclass
class EagleHead:
    """A draft head, ready to run: its forward, weights and KV cache."""

    config: EngineConfig
    compiled: CompiledModel | None
    model: ModelForward
    kv_caches: list[torch.Tensor]
    token_ids_V: torch.Tensor  # the model's token id for each token id of the head, int64 on the CPU
    num_parameters: int

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of num_blocks blocks."""
        self.kv_caches[:] = cache_memory.allocate(self.config, num_blocks)

    def close(self) -> None:
        """Drop the last references to the weights and the cache."""
        self.kv_caches.clear()
        self.model.close()


def load_head(config: EngineConfig, parts: RunnerParts) -> EagleHead:
    """Compile and load a head. config: its own. Raises what the compiler and the loader raise."""
    group, progress, timeline = parts.group, parts.progress, parts.timeline
    embedding_VD, compiled = embedding_of(parts.module, config), None
    if config.compile.enabled:
        compiled = compile_in_turn(config, group, parts.trace, progress, timeline)
    shared = {} if embedding_VD is None else {EMBEDDING: embedding_VD}
    with timeline.span("load weights"):
        model, named = load_model(config, compiled, group, progress, shared)
        token_ids_V = draft_tokens(config.model)
    most_tokens, recorded = config.scheduler.max_num_batched_tokens, config.graph.mode is GraphMode.RECORDED
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    forward = ModelForward(model, compiled, named, parts.on_attention, most_tokens, recorded)
    return EagleHead(config, compiled, forward, cache_memory.allocate(config, 1), token_ids_V, num_parameters)
