"""Convert a config.json to the ModelConfig of a textbook model."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_engine.config import ExpertsConfig, LengthAngles, ModelConfig, RopeConfig
from compiled_engine.models.checkpoint.families import FAMILIES, Family
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.textbook.rope import ROPE_KINDS


def textbook_model(fields: JsonFields, path: Path, dtype: torch.dtype) -> tuple[ModelConfig, str]:
    """Return the configuration of a textbook model, and a text that names the source of its max_model_len.

    max_model_len is the longest length that the model supports. fields: the fields of config.json. path: the
    checkpoint's folder. Raises ValueError for a field that is wrong, missing or not supported.
    """
    architecture = fields.texts("architectures")[0]
    family = FAMILIES[architecture]
    _refuse_unsupported(fields, family)
    num_layers = fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.nullable_integer("num_key_value_heads", absent=family.num_kv_heads) or num_heads
    divisor = f"a divisor of num_attention_heads = {num_heads}"
    fields.require("num_key_value_heads", num_heads % num_kv_heads == 0, divisor)
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope, local_theta = _ropes(fields, family, max_position_embeddings)
    head_dim = _head_dim(fields, family.head_dim, hidden_size, num_heads)
    _check_length_angles(fields, rope, local_theta, head_dim)
    biases = family.biases(fields)
    supported_length, origin = _supported_length(rope, local_theta, max_position_embeddings)
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
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", family.tied),
        qkv_bias=biases.qkv,
        attention_out_bias=biases.attention_out,
        mlp_bias=biases.mlp,
        sliding_windows=family.sliding_windows(fields, num_layers),
        dtype=dtype,
        max_model_len=supported_length,
        load_format="safetensors",
        seed=0,
        attention_scale=_attention_scale(fields, family.query_scalar),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", family.soft_caps[0]),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", family.soft_caps[1]),
        local_rope_theta=local_theta,
        length_angles=_length_angles(rope),
        experts=family.experts(fields, num_layers) if family.experts else ExpertsConfig(),
    )
    return model, origin


def _refuse_unsupported(fields: JsonFields, family: Family) -> None:
    name, activation = family.activation
    if fields.text(name, activation) != activation:
        raise _only_of_transformers(fields, name, activation)
    fields.require_values(use_bidirectional_attention=False)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise _only_of_transformers(fields, "partial_rotary_factor", "1.0")


def _only_of_transformers(fields: JsonFields, name: str, allowed: str) -> ValueError:
    """Return the error for a value of the field `name` that transformers' code supports and textbook code does not."""
    return ValueError(f"{fields.error(name, allowed)}; model_impl='transformers' runs the code of transformers instead")


def _attention_scale(fields: JsonFields, default: float | None) -> float | None:
    """Return the scale of attention scores, from the field query_pre_attn_scalar or else from its `default`.

    Returns None if both are missing: the scale then depends on the head size. Gemma models have the field.
    """
    scalar = fields.number("query_pre_attn_scalar") if "query_pre_attn_scalar" in fields else default
    return None if scalar is None else scalar**-0.5


def _soft_cap(fields: JsonFields, name: str, default: float) -> float:
    """Return the soft cap in the field `name`; 0 (no cap) if the field is null, the default if it is missing."""
    return fields.number(name) if name in fields else 0.0 if name in fields.values else default


def _head_dim(fields: JsonFields, default: int | None, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.nullable_integer("head_dim", absent=default)
    if head_dim is None:
        multiple = f"a multiple of num_attention_heads = {num_heads} without head_dim"
        fields.require("hidden_size", hidden_size % num_heads == 0, multiple)
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"{fields.source}: head_dim must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _ropes(fields: JsonFields, family: Family, max_position_embeddings: int) -> tuple[RopeConfig, float | None]:
    """Return the model's rope, and the rope theta of sliding-window layers; None if all layers have the same rope.

    In transformers 5, rope_parameters has both, by layer type. In transformers 4, rope_local_base_freq has the theta of
    sliding-window layers.
    """
    by_kind = fields.section("rope_parameters")
    if "full_attention" in by_kind and "sliding_attention" in by_kind:
        full, sliding = by_kind.section("full_attention"), by_kind.section("sliding_attention")
        sliding.require_values(rope_type="default")
        of_full = JsonFields(full.source, {"rope_parameters": full.values})
        rope = _rope(of_full, family.rope_theta, max_position_embeddings)
        return rope, sliding.number("rope_theta", 10000.0)
    rope = _rope(fields, family.rope_theta, max_position_embeddings)
    if "rope_local_base_freq" in fields:
        return rope, fields.number("rope_local_base_freq")
    return rope, family.local_theta


def _rope(fields: JsonFields, default_theta: float, max_position_embeddings: int) -> RopeConfig:
    """Return the rope that config.json describes.

    transformers 4 writes the fields rope_theta and rope_scaling, transformers 5 the field rope_parameters.
    default_theta: for a config.json without theta. Raises ValueError for a rope that is wrong or not supported.
    """
    scaling = fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    theta = scaling.number("rope_theta") if "rope_theta" in scaling else fields.number("rope_theta", default_theta)
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    if scaling.values.get(kind_field) == "su":  # LongRoPE's first name
        scaling = scaling.replaced(**{kind_field: "longrope"})
    kind = scaling.one_of(kind_field, ROPE_KINDS, "default")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise _only_of_transformers(scaling, "partial_rotary_factor", "1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=scaling.number("factor"))
    if kind == "dynamic":
        return RopeConfig(theta, kind, scaling.number("factor"), max_position_embeddings)
    lengths = fields if "original_max_position_embeddings" in fields else scaling
    original = lengths.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        scaling.require("high_freq_factor", low < high, f"above low_freq_factor = {low}")
        return RopeConfig(theta, kind, scaling.number("factor"), original, low, high)
    if kind == "longrope":
        return RopeConfig(
            theta,
            kind,
            factor=scaling.number("factor", max_position_embeddings / original),
            original_max_position_embeddings=original,
            attention_factor=scaling.number("attention_factor") if "attention_factor" in scaling else None,
            short_factor=scaling.numbers("short_factor"),
            long_factor=scaling.numbers("long_factor"),
        )
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


def _check_length_angles(fields: JsonFields, rope: RopeConfig, local_theta: float | None, head_dim: int) -> None:
    """Raise ValueError for unsupported rotary angles that depend on a request's length (longrope and dynamic rope).

    They are not supported if only some layers have them, or if the numbers of factors do not fit `head_dim`.
    """
    if _length_angles(rope) is not None and local_theta is not None:
        raise ValueError(
            f"{fields.source}: rope_type is {rope.kind!r} in some layers; allowed: default, linear, llama3 or yarn"
        )
    for name in ("short_factor", "long_factor"):
        count = len(getattr(rope, name))
        if rope.kind == "longrope" and count != head_dim // 2:
            raise ValueError(f"{fields.source}: {name} must have {head_dim // 2} numbers, got {count}")


def _length_angles(rope: RopeConfig) -> LengthAngles | None:
    if rope.kind not in ("longrope", "dynamic") or rope.original_max_position_embeddings is None:
        return None
    return LengthAngles(rope.original_max_position_embeddings, recomputes=rope.kind == "longrope")


def _supported_length(rope: RopeConfig, local_theta: float | None, max_position_embeddings: int) -> tuple[int, str]:
    """Return the longest supported length in tokens, and a text that names its source.

    If sliding-window layers have their own theta, as in Gemma 3, max_position_embeddings already includes the linear
    factor.
    """
    if rope.kind in ("linear", "dynamic") and local_theta is None:
        return int(max_position_embeddings * rope.factor), f"max_position_embeddings x the {rope.kind} rope factor"
    if rope.kind == "yarn" and rope.original_max_position_embeddings is not None:
        length = int(rope.original_max_position_embeddings * rope.factor)
        return length, "original_max_position_embeddings x the yarn rope factor"
    return max_position_embeddings, "the model's max_position_embeddings"
