"""config.json to the ModelConfig of a textbook model."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_engine.config import ModelConfig, RopeConfig
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.textbook.rope import ROPE_KINDS


def textbook_model(fields: JsonFields, path: Path, dtype: torch.dtype) -> tuple[ModelConfig, str]:
    """The model of a family that the textbook has, and where its max_model_len, the longest supported, comes from.

    Raises ValueError for a field that is wrong, missing or not supported.
    """
    architecture = fields.texts("architectures")[0]
    family = FAMILIES[architecture]
    _refuse_unsupported(fields)
    num_layers = fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.nullable_integer("num_key_value_heads", absent=family.num_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope = _rope(fields, max_position_embeddings)
    biases = family.biases(fields)
    supported_length, origin = _supported_length(rope, max_position_embeddings)
    model = ModelConfig(
        path=path,
        hub_name=None,
        revision=None,
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, family.head_dim, hidden_size, num_heads),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=biases.qkv,
        attention_out_bias=biases.attention_out,
        mlp_bias=biases.mlp,
        sliding_windows=family.sliding_windows(fields, num_layers),
        dtype=dtype,
        max_model_len=supported_length,
        load_format="safetensors",
        seed=0,
    )
    return model, origin


def _refuse_unsupported(fields: JsonFields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "silu")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1.0")


def _head_dim(fields: JsonFields, default: int | None, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.nullable_integer("head_dim", absent=default)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads} without head_dim")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"{fields.source}: head_dim must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    """From rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""
    scaling = fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    theta = scaling.number("rope_theta") if "rope_theta" in scaling else fields.number("rope_theta", 10000.0)
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(kind_field, "default")
    if kind not in ROPE_KINDS:
        raise scaling.error(kind_field, f"one of {', '.join(ROPE_KINDS)}")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.error("partial_rotary_factor", "1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=scaling.number("factor"))
    lengths = fields if "original_max_position_embeddings" in fields else scaling
    original = lengths.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.error("high_freq_factor", f"above low_freq_factor = {low}")
        return RopeConfig(theta, kind, scaling.number("factor"), original, low, high)
    return RopeConfig(
        theta,
        kind,
        factor=scaling.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor") if "attention_factor" in scaling else None,
        mscale=scaling.number("mscale") if "mscale" in scaling else None,
        mscale_all_dim=scaling.number("mscale_all_dim") if "mscale_all_dim" in scaling else None,
        truncate=scaling.boolean("truncate", True),
    )


def _supported_length(rope: RopeConfig, max_position_embeddings: int) -> tuple[int, str]:
    """Tokens, and where the number comes from."""
    if rope.kind == "linear":
        return int(max_position_embeddings * rope.factor), "max_position_embeddings x the linear rope factor"
    if rope.kind == "yarn" and rope.original_max_position_embeddings is not None:
        length = int(rope.original_max_position_embeddings * rope.factor)
        return length, "original_max_position_embeddings x the yarn rope factor"
    return max_position_embeddings, "the model's max_position_embeddings"
