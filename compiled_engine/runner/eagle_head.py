"""An EAGLE-3 head as a rank has it: compiled or eager, with its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, GraphMode, ModelConfig
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.models.checkpoint.eagle3_folder import EMBEDDING, draft_tokens, has_embedding
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner import kv_cache
from compiled_engine.runner.model_forward import ModelForward, compile_in_turn, load_model


def embedding_of(model: nn.Module, config: EngineConfig) -> torch.Tensor | None:
    """The embedding of the engine's model, for a head (`config`) that has none of its own. Raises ValueError if the
    model has none of that shape."""
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
    """A head as a rank has it. token_ids_V: int64, the model's token for each token of the head, on the CPU."""

    config: EngineConfig
    compiled: CompiledModel | None
    model: ModelForward
    kv_caches: list[torch.Tensor]
    token_ids_V: torch.Tensor
    num_parameters: int

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of num_blocks blocks."""
        self.kv_caches[:] = kv_cache.allocate(self.config, num_blocks)

    def close(self) -> None:
        """Drop the last references to the weights and the cache."""
        self.kv_caches.clear()
        self.model.close()


def load_head(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    on_attention: OnAttention | None,
    progress: Progress,
    timeline: Timeline,
    embedding_VD: torch.Tensor | None,
) -> EagleHead:
    """Compile and load a head. config: of the head. embedding_VD: the model's, None if the head has its own. Raises
    what the compiler and the loader raise."""
    compiled = None
    if config.compile.enabled:
        compiled = compile_in_turn(config, group, model_to_trace, progress, timeline)
    shared = {} if embedding_VD is None else {EMBEDDING: embedding_VD}
    with timeline.span("load weights"):
        model, named = load_model(config, compiled, group, progress, shared)
        token_ids_V = draft_tokens(config.model)
    most_tokens, recorded = config.scheduler.max_num_batched_tokens, config.graph.mode is GraphMode.RECORDED
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    forward = ModelForward(model, compiled, named, on_attention, most_tokens, recorded)
    return EagleHead(config, compiled, forward, kv_cache.allocate(config, 1), token_ids_V, num_parameters)
