"""Determines the part of a model that a rank computes: the layers of its pipeline stage, and a share of each layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from compiled_engine.config import EngineConfig, HeadShape, ModelConfig, RowState
from compiled_engine.recurrence.states import divided, local_groups

# Rows of MLPs and of experts, under the names that the families which can be divided have for them.
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
)
# Fields for the heads of matrix states, and for heads of keys or groups of heads, by model type; and of all others.
_SPACE, _KIMI = ("mamba_n_heads", "mamba_n_groups"), ("linear_num_heads", "linear_num_heads")
_RECURRENT_HEADS = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _SPACE),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _KIMI),
    "nemotron_h": ("mamba_num_heads", "n_groups"),
}
KEY_HEADS = "linear_num_key_heads"
_DELTA_NET = ("linear_num_value_heads", KEY_HEADS)
# Model types whose field `mamba_expand` states the channels of a state space model, as a multiple of hidden_size.
_EXPANDED = ("bamba", "granitemoehybrid")


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
    """Return the model's configuration with the sizes that one tensor-parallel rank computes.

    In a batch-invariant engine each rank has the whole vocabulary, so that sampling and sums of probabilities are those
    of a single device.
    """
    return local_share(config.model, config.parallel.tensor_parallel_size, whole_vocabulary=config.batch_invariant)


def local_share(model: ModelConfig, num_ranks: int, *, whole_vocabulary: bool = False) -> ModelConfig:
    """Return the model's configuration with the sizes that one of num_ranks ranks computes.

    Heads, MLPs, experts, recurrent states and the vocabulary are divided. With more ranks than KV heads, each rank has
    one KV head, and several ranks have the same one. A vocabulary stays whole with whole_vocabulary, and if num_ranks
    does not divide it.
    """
    if num_ranks == 1:
        return model
    is_whole = whole_vocabulary or model.vocab_size % num_ranks
    vocab_size = model.vocab_size if is_whole else model.vocab_size // num_ranks

    def part(heads: HeadShape) -> HeadShape:
        num_kv_heads = max(1, heads.num_kv_heads // num_ranks)
        return replace(heads, num_heads=heads.num_heads // num_ranks, num_kv_heads=num_kv_heads)

    of_latents = model.latent_dim, model.key_dim, model.value_dim
    usual = part(HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, *of_latents))
    foreign, recurrences = model.transformers, model.recurrences
    if foreign is not None:
        values = _divided_config(json.loads(foreign.config), num_ranks, usual, vocab_size)
        values |= _divided_recurrences(values, model, num_ranks)
        foreign = replace(foreign, config=json.dumps(values, sort_keys=True))
    return replace(
        model,
        num_heads=usual.num_heads,
        num_kv_heads=usual.num_kv_heads,
        layer_heads=None if model.layer_heads is None else tuple(map(part, model.layer_heads)),
        intermediate_size=model.intermediate_size // num_ranks,
        vocab_size=vocab_size,
        experts=replace(model.experts, intermediate_size=model.experts.intermediate_size // num_ranks),
        transformers=foreign,
        recurrences=recurrences and replace(recurrences, states=divided(recurrences.states, num_ranks)),
    )


def _divided_config(values: dict[str, Any], num_ranks: int, heads: HeadShape, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a transformers configuration with the sizes of one rank.

    heads: those of a rank, in the first layer with attention. vocab_size: tokens of a rank.
    """
    changed: dict[str, Any] = {"num_attention_heads": heads.num_heads, "vocab_size": vocab_size}
    if values.get("qk_rope_head_dim") is not None:  # latent attention: each query head has keys of its own
        changed["num_key_value_heads"] = heads.num_heads
        if heads.value_dim:
            changed["v_head_dim"] = heads.value_dim  # MiniCPM3's code would divide hidden_size by the number of heads
    elif values.get("num_key_value_heads") is not None or heads.num_kv_heads != heads.num_heads:
        changed["num_key_value_heads"] = heads.num_kv_heads
    if values.get("qk_rope_head_dim") is None and values.get("head_dim") is None:
        changed["head_dim"] = heads.head_dim  # the code would divide hidden_size by the number of heads
    if isinstance(others := values.get("num_global_key_value_heads"), int):  # of Gemma 4's layers without a window
        changed["num_global_key_value_heads"] = max(1, others // num_ranks)
    if isinstance(layers := values.get("per_layer_config"), dict):  # the same fields, as transformers writes them
        changed["per_layer_config"] = {index: _divided_layer(own, num_ranks) for index, own in layers.items()}
    if isinstance(tokens := values.get("vocab_size_per_layer_input"), int) and tokens % num_ranks == 0:
        changed["vocab_size_per_layer_input"] = tokens // num_ranks
    changed |= {name: width // num_ranks for name, width in _widths_in(values).items()}
    changed["pad_token_id"] = None  # it may not be among a rank's tokens, and nothing is padded
    return values | changed


def _divided_layer(values: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    changed = {name: width // num_ranks for name, width in _widths_in(values).items()}
    if isinstance(num_kv_heads := values.get("num_key_value_heads"), int):
        changed["num_key_value_heads"] = max(1, num_kv_heads // num_ranks)
    return values | changed


def widths(model: ModelConfig) -> dict[str, int]:
    """Return the numbers of rows of MLPs and of experts that ranks divide, by their fields in config.json.

    Empty for a textbook model.
    """
    return {} if model.transformers is None else _widths_in(json.loads(model.transformers.config))


def _widths_in(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: values[name] for name in _WIDTHS if isinstance(values.get(name), int)}


def recurrent_heads(model: ModelConfig) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return what ranks divide in a model's recurrences; None if there are no matrix states.

    (field, number) of the heads, then of the heads of keys or the groups of heads. Fields are those of config.json.
    """
    matrix = None if model.recurrences is None else _matrix(model.recurrences.states)
    if matrix is None or model.transformers is None:
        return None
    heads, groups = _RECURRENT_HEADS.get(_type_of(model), _DELTA_NET)
    return (heads, matrix.shape[0]), (groups, matrix.num_groups)


def expansion(model: ModelConfig) -> int | None:
    """Return the field `mamba_expand` of a model whose state space models have so many times hidden_size channels.

    None for other models. The ranks' number must divide it.
    """
    matrix = None if model.recurrences is None else _matrix(model.recurrences.states)
    if matrix is None or _type_of(model) not in _EXPANDED:
        return None
    return matrix.shape[0] * matrix.shape[2] // model.hidden_size


def _type_of(model: ModelConfig) -> str:
    return "" if model.transformers is None else str(json.loads(model.transformers.config).get("model_type"))


def _matrix(states: Iterable[RowState]) -> RowState | None:
    """Return a matrix state; those of a model have the same shape. None if there is none."""
    return next((state for state in states if state.num_groups), None)


def _divided_recurrences(values: Mapping[str, Any], model: ModelConfig, num_ranks: int) -> dict[str, Any]:
    """Return the fields of a transformers configuration that state one rank's sizes of recurrences.

    Fields that config.json leaves out, since transformers has the same default, are stated too.
    """
    found = recurrent_heads(model)
    if found is None or model.recurrences is None:
        return {}
    (heads, num_heads), (groups, num_groups) = found
    changed: dict[str, Any] = {groups: local_groups(num_groups, num_ranks), heads: num_heads // num_ranks}
    if "mamba_n_groups" in values:  # Nemotron-H's code prefers it to its own field
        changed["mamba_n_groups"] = changed[groups]
    if isinstance(section := values.get("linear_attn_config"), dict):  # Kimi's checkpoints state the heads there
        changed["linear_attn_config"] = section | {"num_heads": changed[heads]}
    matrix = _matrix(model.recurrences.states)
    assert matrix is not None
    if (expanded := expansion(model)) is not None:
        changed |= {"mamba_expand": expanded // num_ranks, "mamba_d_head": matrix.shape[2]}
    elif heads == _SPACE[0]:
        changed |= {"mamba_d_ssm": changed[heads] * matrix.shape[2], "mamba_d_head": matrix.shape[2]}
    return changed
