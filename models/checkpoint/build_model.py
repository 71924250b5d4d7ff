"""A configuration's model, textbook or transformers' code, and the slices of its parameters that a rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.models.foreign.description import IMPORTING, skeleton
from compiled_engine.models.foreign.find_description import find_description
from compiled_engine.models.foreign.weights import mark_packed
from compiled_engine.models.textbook import architectures
from compiled_engine.models.textbook.pooler import Pooler
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.shards import Shard, compare_shapes


def build_model(config: ModelConfig) -> Any:
    """The model on the meta device, in config.dtype; `parameters.materialize` gives its parameters memory.

    It has `forward(input_ids_T, positions_T, attention_inputs, kv_caches) -> hidden_TD` and
    `logits(hidden_RD) -> logits_RV`, or if it pools `pooler(pooled_RW) -> result_RL`. An encoder takes the token types
    too, if its tokens have any; with recurrences `forward` takes rows_R, see recurrence.sequences. Buffers (rotary
    frequencies) are fp32 on the CPU.
    """
    if config.transformers is None:
        return _with_pooler(architectures.build_model(config), config)
    with IMPORTING:
        from compiled_engine.models.foreign.transformers_model import build_foreign_model  # imports transformers

        model = build_foreign_model(config.transformers.config, config.dtype)[0]
    return _with_pooler(_with_states(model, config), config)


def build_tensors(config: ModelConfig, cache_dir: Path | None) -> Any:
    """The model to be given memory and weights where its code is compiled already: without its code if that is
    transformers'."""
    if config.transformers is None:
        return _with_pooler(architectures.build_model(config), config)
    model = skeleton(find_description(config.transformers.config, config.dtype, cache_dir))
    return _with_pooler(_with_states(model, config), config)


def _with_states(model: Any, config: ModelConfig) -> Any:
    """The model with the states of its recurrences, buffers on the meta device; `row_states` has their names."""
    if (recurrences := config.recurrences) is not None:
        model.row_states = frozenset(state.name for state in recurrences.states)
        count = recurrences.num_rows + recurrences.num_snapshots
        for state in recurrences.states:
            owner, _, name = state.name.rpartition(".")
            rows = torch.empty((count, *state.shape), dtype=getattr(torch, state.dtype), device="meta")
            model.get_submodule(owner).register_buffer(name, rows, persistent=False)
    return model


def _with_pooler(model: Any, config: ModelConfig) -> Any:
    """The model with a pooler in the place of its output projection, if it pools; an encoder has none to replace."""
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


# The slice of each parameter that a rank of this configuration holds.


def shards_of(config: EngineConfig) -> dict[str, Shard]:
    """Shards by parameter name, tied ones under each name; empty for one rank. Raises what compare_shapes raises."""
    if config.parallel.tensor_parallel_size == 1:
        return {}
    return compare_shapes(_tensors(config.model, config), _tensors(local_model(config), config))


def _tensors(model: ModelConfig, config: EngineConfig) -> Any:
    tensors = build_tensors(model, config.compile.cache_dir)
    if model.transformers is not None:
        mark_packed(tensors, model)
    return tensors
