"""Build the model of a configuration, with textbook or transformers' code, and find each rank's parameter slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.models.foreign.description import IMPORTING, skeleton
from compiled_engine.models.foreign.find_description import find_description
from compiled_engine.models.foreign.weights import mark_packed
from compiled_engine.models.textbook import architectures
from compiled_engine.models.textbook.mtp import make_mtp_layer
from compiled_engine.models.textbook.pooler import Pooler
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import Shard, compare_shapes


def build_model(config: ModelConfig) -> Any:
    """Build the model on the meta device, in config.dtype. `parameters.materialize` allocates its parameters.

    The model has `forward(input_ids_T, positions_T, attention_inputs, kv_caches) -> hidden_TD`. It also has
    `logits(hidden_RD) -> logits_RV` or, if it pools, `pooler(pooled_RW) -> result_RL`. The `forward` of an encoder with
    token types also takes the tokens' types; that of a model with recurrences also takes rows_R, see
    recurrence.sequences.Sequences. For draft heads see textbook.architectures, for vision towers vision/tower.py.
    Buffers (rotary frequencies) are fp32 on the CPU.

    T: tokens. R: requests. D: hidden size. V: vocabulary. W: width of pooled vectors. L: width of the pooler's results.
    """
    if config.transformers is None:
        return _with_pooler(architectures.build_model(config), config)
    if config.vision is not None:
        return _tower(config.transformers.config, config.dtype)
    with IMPORTING:
        from compiled_engine.models.foreign.transformers_model import build_foreign_model  # imports transformers

        model = build_foreign_model(config.transformers.config, config.dtype)[0]
    return _completed(model, config)


def build_tensors(config: ModelConfig, cache_dir: Path | None) -> Any:
    """Build the model for use with compiled code, which only needs the model's tensors.

    For a model with transformers' code, this is a Skeleton, which has the tensors but no code; vision towers keep their
    code. cache_dir: see `find_description`.
    """
    if config.transformers is None:
        return _with_pooler(architectures.build_model(config), config)
    if config.vision is not None:
        return _tower(config.transformers.config, config.dtype)
    return _completed(skeleton(find_description(config.transformers.config, config.dtype, cache_dir)), config)


def _completed(model: Any, config: ModelConfig) -> Any:
    """Return a transformers model with the engine's parts added.

    These are an MTP layer's projection if the model is a draft head; otherwise recurrence states and a pooler, if the
    model has them.
    """
    if config.head is not None:
        return make_mtp_layer(model, config)
    return _with_pooler(_with_states(model, config), config)


def _tower(config_json: str, dtype: torch.dtype) -> Any:
    with IMPORTING:
        from compiled_engine.models.vision.tower import build_tower  # imports transformers

        return build_tower(config_json, dtype)


def _with_states(model: Any, config: ModelConfig) -> Any:
    """Add the states of the model's recurrences as buffers on the meta device, and list their names in `row_states`.

    Returns the model. A model without recurrences is not changed.
    """
    if (recurrences := config.recurrences) is not None:
        model.row_states = frozenset(state.name for state in recurrences.states)
        for state in recurrences.states:
            owner, _, name = state.name.rpartition(".")
            shape = recurrences.rows_of(state), *state.shape
            rows = torch.empty(shape, dtype=getattr(torch, state.dtype), device="meta")
            model.get_submodule(owner).register_buffer(name, rows, persistent=False)
    return model


def _with_pooler(model: Any, config: ModelConfig) -> Any:
    """Add a pooler to a pooling model, and return the model. The pooler replaces a decoder's output projection.

    Models that do not pool, and classifiers with a head of their own, are returned unchanged.
    """
    if config.pooling is None or config.pooling.own_head:
        return model
    if config.causal:
        children = dict(model.named_children())
        decoder = max(children, key=lambda name: len(list(children[name].parameters())))
        for name in children.keys() - {decoder}:
            delattr(model, name)
    with torch.device("meta"):
        model.pooler = Pooler(config.pooling.head).eval().requires_grad_(False)
    return model


# Slices of parameters that the ranks of a configuration hold.


def shards_of(config: EngineConfig) -> dict[str, Shard]:
    """Return the shard of each parameter by name. A tied parameter is listed under each of its names.

    Returns an empty dict without tensor parallelism. Raises the errors of `compare_shapes`.
    """
    if config.parallel.tensor_parallel_size == 1:
        return {}
    return compare_shapes(_tensors(config.model, config), _tensors(local_model(config), config))


def _tensors(model: ModelConfig, config: EngineConfig) -> Any:
    tensors = build_tensors(model, config.compile.cache_dir)
    if model.transformers is not None:
        mark_packed(tensors, model)
    return tensors
