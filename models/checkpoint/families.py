"""What the config.json of each known architecture leaves unsaid.

Where a field is absent, each family takes the default that transformers takes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiled_engine.models.checkpoint.json_fields import JsonFields


@dataclass(frozen=True)
class Biases:
    """Which projections have one: q, k and v; o; gate, up and down."""

    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Family:
    """`num_kv_heads` and `head_dim` are defaults; None is one a query head, and hidden size / heads."""

    num_kv_heads: int | None
    head_dim: int | None
    biases: Callable[[JsonFields], Biases]
    sliding_windows: Callable[[JsonFields, int], tuple[int | None, ...]]


def _llama_biases(fields: JsonFields) -> Biases:
    attention = fields.boolean("attention_bias", False)
    return Biases(qkv=attention, attention_out=attention, mlp=fields.boolean("mlp_bias", False))


def _qwen3_biases(fields: JsonFields) -> Biases:
    attention = fields.boolean("attention_bias", False)
    return Biases(qkv=attention, attention_out=attention)


def _no_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (fields.nullable_integer("sliding_window", absent=4096),) * num_layers


def _qwen_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """The window is for the layers that `layer_types` names, else for those from `max_window_layers` on."""
    in_use = fields.boolean("use_sliding_window", False)
    window = fields.nullable_integer("sliding_window", absent=4096) if in_use else None
    if "layer_types" not in fields:
        first = fields.values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise fields.error("max_window_layers", "a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"{num_layers} entries, each full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise ValueError(f"{fields.source}: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


FAMILIES = {
    "LlamaForCausalLM": Family(None, None, _llama_biases, _no_windows),
    "MistralForCausalLM": Family(8, None, lambda fields: Biases(), _mistral_windows),
    "Qwen2ForCausalLM": Family(32, None, lambda fields: Biases(qkv=True), _qwen_windows),
    "Qwen3ForCausalLM": Family(32, 128, _qwen3_biases, _qwen_windows),
}
