"""Determines the part of a model that a rank computes: the layers of its pipeline stage, and a share of each layer."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from compiled_engine.config import EngineConfig, HeadShape, ModelConfig, Recurrences

# Heads of gated delta nets, of keys and of values.
DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
# Rows of MLPs and of experts, under the names that the families which can be divided have for them.
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class LayerShare:
    """The consecutive layers that a rank computes as pipeline stage `index` of `count`.

    All ranks with the same layers form the stage.
    """

    layers: range  # whose attention and KV cache are on the rank
    index: int = 0  # from 0 to count - 1
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def local_model(config: EngineConfig) -> ModelConfig:
    """Return the model's configuration with the sizes that one tensor-parallel rank computes."""
    return local_share(config.model, config.parallel.tensor_parallel_size)


def local_share(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the model's configuration with the sizes that one of num_ranks ranks computes.

    Heads, MLPs, experts, recurrent states and the vocabulary are divided. With more ranks than KV heads, each rank has
    one KV head, and several ranks have the same one. A vocabulary that num_ranks does not divide stays whole.
    """
    if num_ranks == 1:
        return model
    vocab_size = model.vocab_size if model.vocab_size % num_ranks else model.vocab_size // num_ranks

    def part(heads: HeadShape) -> HeadShape:
        num_kv_heads = max(1, heads.num_kv_heads // num_ranks)
        return replace(heads, num_heads=heads.num_heads // num_ranks, num_kv_heads=num_kv_heads)

    usual = part(HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, model.latent_dim))
    foreign = model.transformers
    if foreign is not None:
        sizes = usual.num_heads, usual.num_kv_heads, usual.head_dim
        foreign = replace(foreign, config=_divided_config(foreign.config, num_ranks, sizes, vocab_size))
    return replace(
        model,
        num_heads=usual.num_heads,
        num_kv_heads=usual.num_kv_heads,
        layer_heads=None if model.layer_heads is None else tuple(map(part, model.layer_heads)),
        intermediate_size=model.intermediate_size // num_ranks,
        vocab_size=vocab_size,
        experts=replace(model.experts, intermediate_size=model.experts.intermediate_size // num_ranks),
        transformers=foreign,
        recurrences=None if model.recurrences is None else _divided_states(model.recurrences, num_ranks),
    )


def _divided_config(config_json: str, num_ranks: int, heads: tuple[int, int, int], vocab_size: int) -> str:
    """Return a transformers configuration, as JSON, with the sizes of one rank.

    heads: (query heads of a rank, KV heads of a rank, elements of a head). vocab_size: tokens of a rank.
    """
    values: dict[str, Any] = json.loads(config_json)
    num_heads, num_kv_heads, head_dim = heads
    values |= {"num_attention_heads": num_heads, "vocab_size": vocab_size}
    if values.get("qk_rope_head_dim") is None:
        values["head_dim"] = head_dim
    else:  # latent attention: sizes of heads follow from other fields, and each query head has keys of its own
        num_kv_heads = num_heads
    if values.get("num_key_value_heads") is not None:
        values["num_key_value_heads"] = num_kv_heads
    values |= {
        name: values[name] // num_ranks for name in (*_WIDTHS, *DELTA_HEADS) if isinstance(values.get(name), int)
    }
    values["pad_token_id"] = None  # it may not be among a rank's tokens, and nothing is padded
    return json.dumps(values, sort_keys=True)


def _divided_states(recurrences: Recurrences, num_ranks: int) -> Recurrences:
    """Return `recurrences` with one rank's states: the first dimension of each state, heads or channels, is divided."""
    states = (replace(state, shape=(state.shape[0] // num_ranks, *state.shape[1:])) for state in recurrences.states)
    return replace(recurrences, states=tuple(states))
