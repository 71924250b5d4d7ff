"""The slice of each parameter that a rank of this configuration holds."""

from __future__ import annotations

from typing import Any

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.models.checkpoint.build_model import build_tensors
from compiled_engine.models.foreign.packed_rows import mark_packed
from compiled_engine.parallel.shards import Shard, compare_shapes


def shards_of(config: EngineConfig) -> dict[str, Shard]:
    """Shards by parameter name, tied ones under each name; empty for one rank. Raises what compare_shapes raises."""
    if config.parallel.tensor_parallel_size == 1:
        return {}
    return compare_shapes(_tensors(config.model, config), _tensors(config.local_model, config))


def _tensors(model: ModelConfig, config: EngineConfig) -> Any:
    tensors = build_tensors(model, config.compile.cache_dir)
    if model.transformers is not None:
        mark_packed(tensors, model)
    return tensors
