"""Which slice of each parameter, and of each tensor of a checkpoint, a rank of this configuration holds."""

from __future__ import annotations

from typing import Any

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.models.checkpoint.build_model import build_tensors
from compiled_engine.models.checkpoint.loader import checkpoint_tensors
from compiled_engine.models.foreign.packed_rows import mark_packed
from compiled_engine.parallel.shards import RankShare, Shard, compare_shapes, shard_of


def shards_of(config: EngineConfig) -> dict[str, Shard]:
    """By parameter name, tied ones under each of theirs; empty for one rank. Raises what compare_shapes raises."""
    if config.parallel.tensor_parallel_size == 1:
        return {}
    return compare_shapes(*_both(config))


def share_of(config: EngineConfig, rank: int) -> RankShare:
    """What rank `rank` holds of the parameters, and of what a checkpoint has of them in parts."""
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks == 1:
        return RankShare({})
    whole, local = _both(config)
    shards = compare_shapes(whole, local)
    here = checkpoint_tensors(local)
    for name, tensor in checkpoint_tensors(whole).items():
        if name not in shards:
            shards[name] = shard_of(name, tuple(tensor.shape), tuple(here[name].shape))
    return RankShare(shards, rank, num_ranks)


def _both(config: EngineConfig) -> tuple[Any, Any]:
    """The whole model and a rank's, on the meta device."""
    return _tensors(config.model, config), _tensors(config.local_model, config)


def _tensors(model: ModelConfig, config: EngineConfig) -> Any:
    tensors = build_tensors(model, config.compile.cache_dir)
    if model.transformers is not None:
        mark_packed(tensors, model)
    return tensors
