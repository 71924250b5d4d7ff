"""Reads a multimodal checkpoint as a text model: selects the config fields and tensors of its text model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.quantisation_config import MODULE_LISTS, SECTION

T = TypeVar("T")

# Multimodal architectures whose text model computes the same as the whole model if there is only text -> the text
# model's type, for config.json files that do not state it.
WRAPPERS = {
    "Emu3ForConditionalGeneration": "emu3_text_model",
    "FuyuForCausalLM": "persimmon",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "MllamaForConditionalGeneration": "mllama_text_model",
    "Ovis2ForConditionalGeneration": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
}
# Text models that differ from others only in three-dimensional positions, whose dimensions are equal for text.
_EQUAL_FOR_TEXT = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_ARCHITECTURES = {
    "emu3_text_model": "Emu3ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
# Fields that published checkpoints of these types leave out of text_config; the values are transformers' defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {"rms_norm_eps": 1e-6},
}
# Fields of the text model that the multimodal model ignores.
_WITHOUT_EFFECT = {"Gemma3ForConditionalGeneration": {"final_logit_softcapping": None}}
# Fields of the multimodal model that also apply to its text model.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings")
_THREE_DIMENSIONS = ("mrope_section", "mrope_interleaved")
# model.language_model.layers.0 (transformers 5), language_model.model.layers.0 (4), or model.layers.0.
_TEXT = re.compile(
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|^model\.(?=(?:layers|embed_tokens|norm)\.)"
)


def text_model(fields: JsonFields) -> tuple[JsonFields, str | None]:
    """Return the config fields of the text model in a multimodal model, and the multimodal architecture.

    For any other model, return the fields unchanged, and None. fields: the fields of config.json. Raises ValueError for
    a text model of a type that is not supported.
    """
    wrapper = fields.texts("architectures")[0]
    named_as_text = "text_config" in fields and wrapper in _ARCHITECTURES.values()
    if wrapper not in WRAPPERS and not named_as_text:
        return fields, None
    section = fields.section("text_config") if "text_config" in fields else fields
    kind = section.text("model_type", WRAPPERS.get(wrapper))
    kind = _EQUAL_FOR_TEXT.get(kind, kind)
    known = f"one of {', '.join((*_ARCHITECTURES, *_EQUAL_FOR_TEXT))} in a {wrapper}"
    section.require("model_type", kind in _ARCHITECTURES, known)
    values = DEFAULTS.get(kind, {}) | section.values
    values |= {name: fields.values[name] for name in _OF_THE_WHOLE if name in fields}
    values |= {"model_type": kind, "architectures": [_ARCHITECTURES[kind]]} | _WITHOUT_EFFECT.get(wrapper, {})
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(name), dict):
            values[name] = _of_one_dimension(values[name])
    if SECTION in fields:
        stated = fields.section(SECTION)
        lists = [name for name in MODULE_LISTS if stated.values.get(name)]
        names = {name: [text_name(each) or each for each in stated.texts(name)] for name in lists}
        values[SECTION] = stated.values | names
    return JsonFields(section.source, {name: v for name, v in values.items() if name != "vision_config"}), wrapper


def _of_one_dimension(rope: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if name not in _THREE_DIMENSIONS}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def text_name(name: str) -> str | None:
    """Return the name that a module or tensor of a multimodal model has in the text model.

    Returns None if it belongs to another part, such as the vision tower.
    """
    if found := _TEXT.match(name):
        rest = name[found.end() :]
        return rest if rest.startswith("lm_head") else f"model.{rest}"
    return name if name.startswith("lm_head") else None


def text_tensors(tensors: Mapping[str, T]) -> tuple[dict[str, T], Counter[str]]:
    """Return the text model's tensors, by their names in the text model, and the numbers of the other tensors.

    tensors: those of a multimodal checkpoint. The numbers are by part of the model, such as vision_tower.
    """
    found: dict[str, T] = {}
    unread: Counter[str] = Counter()
    for name, tensor in tensors.items():
        own = text_name(name)
        if own is None:
            unread[name.removeprefix("model.").split(".")[0]] += 1
        else:
            found[own] = tensor
    return found, unread
