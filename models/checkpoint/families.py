"""Define, for each textbook architecture, the defaults of fields that config.json lacks, as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiled_engine.config import ExpertsConfig
from compiled_engine.models.checkpoint.json_fields import JsonFields


@dataclass(frozen=True)
class Biases:
    """Says which of a layer's projections have a bias."""

    qkv: bool = False  # q, k and v
    attention_out: bool = False  # o
    mlp: bool = False  # gate, up and down


@dataclass(frozen=True)
class Family:
    """The defaults of one architecture, and functions that read fields which only this architecture has.

    biases, experts: return the configuration from the fields (and the number of layers). sliding_windows: returns the
    window of each layer, None for full attention.
    """

    num_kv_heads: int | None  # default; None: one per query head
    head_dim: int | None  # default; None: hidden size / heads
    biases: Callable[[JsonFields], Biases]
    sliding_windows: Callable[[JsonFields, int], tuple[int | None, ...]]
    tied: bool = False  # default of tie_word_embeddings
    activation: tuple[str, str] = ("hidden_act", "silu")  # the field that names the activation, and the supported value
    experts: Callable[[JsonFields, int], ExpertsConfig] | None = None  # None for dense models
    soft_caps: tuple[float, float] = (0.0, 0.0)  # defaults for attention scores and logits; 0: no cap
    query_scalar: float | None = None  # default of query_pre_attn_scalar; None: head size
    rope_theta: float = 10_000.0
    local_theta: float | None = None  # rope theta of sliding-window layers; None: rope_theta


def _llama_biases(fields: JsonFields) -> Biases:
    attention = fields.boolean("attention_bias", False)
    return Biases(qkv=attention, attention_out=attention, mlp=fields.boolean("mlp_bias", False))


def _attention_biases(fields: JsonFields) -> Biases:
    attention = fields.boolean("attention_bias", False)
    return Biases(qkv=attention, attention_out=attention)


def _no_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (fields.nullable_integer("sliding_window", absent=4096),) * num_layers


def _qwen_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention.

    If `use_sliding_window` is true, the layers of type sliding_attention in `layer_types` have a window; if the field
    `layer_types` is missing, all layers from `max_window_layers` on have one.
    """
    in_use = fields.boolean("use_sliding_window", False)
    window = fields.nullable_integer("sliding_window", absent=4096) if in_use else None
    if "layer_types" not in fields:
        first = fields.values.get("max_window_layers", 28)
        fields.require("max_window_layers", type(first) is int and first >= 0, "a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_by_type(fields, fields.texts("layer_types"), num_layers, window)


def _qwen_moe_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, which is the same for all layers; None for full attention."""
    in_use = fields.boolean("use_sliding_window", False)
    return (fields.nullable_integer("sliding_window", absent=4096) if in_use else None,) * num_layers


def _windows_by_type(
    fields: JsonFields, kinds: list[str], num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    are_known = len(kinds) == num_layers and set(kinds) <= {"full_attention", "sliding_attention"}
    fields.require("layer_types", are_known, f"{num_layers} entries, each full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise ValueError(f"{fields.source}: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _phi3_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (fields.nullable_integer("sliding_window", absent=None),) * num_layers


def _gemma2_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return _gemma_windows(fields, num_layers, period=2)


def _gemma3_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return _gemma_windows(fields, num_layers, period=fields.integer("sliding_window_pattern", 6))


def _gemma_windows(fields: JsonFields, num_layers: int, period: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention.

    Without the field `layer_types`, all layers have a window except the last of every `period` layers.
    """
    window = fields.nullable_integer("sliding_window", absent=4096)
    types = fields.texts("layer_types") if "layer_types" in fields else None
    if types is None:
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    return _windows_by_type(fields, types, num_layers, window)


def _qwen3_experts(fields: JsonFields, num_layers: int) -> ExpertsConfig:
    """Return the configuration of the experts, which also lists the layers that have a dense MLP instead of experts.

    A layer is dense if `mlp_only_layers` lists it, or if its number, from 1, is no multiple of `decoder_sparse_step`.
    """
    named = fields.values.get("mlp_only_layers") or []
    are_layers = isinstance(named, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in named)
    fields.require("mlp_only_layers", are_layers, f"a list of layers, 0 to {num_layers - 1}")
    step = fields.integer("decoder_sparse_step", 1)
    dense = tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    count, per_token = _number_of_experts(fields), fields.integer("num_experts_per_tok", 8)
    fields.require("num_experts_per_tok", per_token <= count, f"at most num_experts = {count}")
    size = fields.integer("moe_intermediate_size", 768)
    return ExpertsConfig(count, per_token, size, fields.boolean("norm_topk_prob", False), dense)


def _number_of_experts(fields: JsonFields) -> int:
    """Return the number of experts, from the field num_experts or num_local_experts.

    transformers 4 writes num_experts, transformers 5 either.
    """
    return fields.integer("num_experts" if "num_experts" in fields else "num_local_experts", 128)


_GELU = "hidden_activation", "gelu_pytorch_tanh"
FAMILIES = {
    "Gemma2ForCausalLM": Family(
        4, 256, _attention_biases, _gemma2_windows, True, _GELU, soft_caps=(50.0, 30.0), query_scalar=256.0
    ),
    "Gemma3ForCausalLM": Family(
        *(4, 256, _attention_biases, _gemma3_windows, True, _GELU),
        query_scalar=256.0,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "LlamaForCausalLM": Family(None, None, _llama_biases, _no_windows),
    "MiMoForCausalLM": Family(32, None, lambda fields: Biases(qkv=True), _qwen_windows),
    "MistralForCausalLM": Family(8, None, lambda fields: Biases(), _mistral_windows),
    "Qwen2ForCausalLM": Family(32, None, lambda fields: Biases(qkv=True), _qwen_windows),
    "Phi3ForCausalLM": Family(None, None, lambda fields: Biases(), _phi3_windows),
    "Qwen3ForCausalLM": Family(32, 128, _attention_biases, _qwen_windows),
    "Qwen3MoeForCausalLM": Family(4, None, _attention_biases, _qwen_moe_windows, experts=_qwen3_experts),
}
