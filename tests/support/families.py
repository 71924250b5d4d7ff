"""Families of transformers' models as tiny random checkpoints, and what of each is worth trying."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# The sizes of every family, under the names that most have for them. Windows are shorter than prompts.
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 6
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
# Names of GPT-2's time.
_OLD_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Family:
    """A model type of transformers, with the fields of its tiny configuration that differ from TINY."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # fields of TINY that it does not take
    renamed: bool = False
    # Configurations of a multimodal type's other parts; the changes are those of its text model.
    others: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 3.0  # of random matrices; norms of delta nets magnify the rounding errors of larger ones

    def config(self) -> dict[str, Any]:
        values = {name: value for name, value in TINY.items() if name not in self.without}
        if self.renamed:
            values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
        values |= dict(self.changes)
        return {"text_config": values, **self.others} if self.others else values

    def to_divide(self) -> Family:
        """Return the family with a vocabulary that two or four ranks divide."""
        return replace(self, changes={**self.changes, "vocab_size": 132})

    def first_layers(self, number: int) -> Family:
        """Return the family with its first layers alone."""
        kinds = {name: each[:number] for name, each in self.changes.items() if name.endswith("layer_types")}
        return replace(self, changes={**self.changes, **kinds, "num_hidden_layers": number})


_NO_HEADS = ("head_dim", "num_key_value_heads")
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
# Queries are scaled from the fifth token on.
_SCALED_QUERIES = {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 4}
_LATENT_YARN = _SHORT_YARN | {"mscale": 0.8, "mscale_all_dim": 0.7}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_GEMMA4 = _WINDOWS | {"global_head_dim": 64, "pad_token_id": 0}
# One key for both keys and values in layers without a window, and experts beside each MLP.
_GEMMA4_EXPERTS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48, "hidden_size_per_layer_input": 0},
}
_GEMMA3 = _WINDOWS | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 20.0}
_NARROW = {"moe_intermediate_size": 48}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
# Attention and a state space model in each layer, with multipliers of all kinds.
_FALCON = {
    "mamba_d_ssm": 128,
    "mlp_multipliers": [0.8, 0.7],
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    **{"key_multiplier": 0.6, "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9},
    **{"ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.7},
}
# Some layers are an MLP alone.
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 24, "chunk_size": 8},
}
# Two heads of a state space model share a group of B and C. D and dt_bias vary, as all vectors do.
_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4, "mamba_d_state": 24, "mamba_chunk_size": 8}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
# Multi-head latent attention, whose keys have more elements than its values.
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
_GROUPS |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5} | _NARROW
# Kimi delta attention beside latent attention, and experts in groups.
_KIMI = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    **{"linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 8, "num_experts_per_tok": 3},
    **{"n_group": 4, "topk_group": 2, "n_shared_experts": 1, **_LATENT, **_NARROW},
}
# Encoders that can be told to attend to earlier tokens alone.
_DECODING_ENCODERS = ("bert", "bert-generation", "electra", "ernie", "roc_bert")
# Without a scale of their own the scores of these are so large that roundings decide.
_GRANITE = ("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")
# Types whose variety is in code, which their defaults run.
_PLAIN = (
    *("afmoe", "apertus1p5_text", "aria_text", "beam", "cohere2_moe", "ctrl", "exaone", "exaone_moe", "flint"),
    *("gpt-sw3", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "kolibri1", "laguna"),
    *("mellum", "minimax_m2", "moshi", "nanochat", "phimoe", "sarvam_moe", "solar_open"),
)
_DECODER = {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
_DECODER |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
_DECODER |= {"scale_embedding": True, "max_target_positions": 256}
_DECODER |= {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODERS = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus")
_DECODERS += ("plbart", "trocr", "whisper")
_PADDED = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
_OTHER_NAMES = ("num_hidden_layers", "num_attention_heads")
_GEMMA3N = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 131,
    "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.6, 0.0, 0.0],
    "pad_token_id": 0,
}
_NARROW_MROPE = {"rope_parameters": _PLAIN_ROPE | {"mrope_section": [2, 3, 3]}}
_TOWER: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": TINY["hidden_size"]}
}


_HEARING: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "num_classes": 2},
    "audio_config": {"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
}


def _tower(kind: str) -> dict[str, Any]:
    return {"vision_config": _TOWER["vision_config"] | {"model_type": kind}}


FAMILIES: tuple[Family, ...] = (
    Family("llama", {"attention_bias": True, "mlp_bias": True}),
    Family("qwen3"),
    Family("qwen2", {"tie_word_embeddings": True}),
    Family("mistral", {"sliding_window": WINDOW}),
    Family("gemma3_text", _GEMMA3),
    Family("gemma4_text", _GEMMA4 | _GEMMA4_EXPERTS),
    Family("gemma4_unified_text", _GEMMA4),
    Family("gemma2", _WINDOWS | {"query_pre_attn_scalar": 24}),
    Family("gemma"),
    Family("phi3", {"sliding_window": WINDOW, "tie_word_embeddings": True}, ("head_dim",)),
    Family("phi", {}, _NO_HEADS),
    Family("smollm3", {"no_rope_layers": [1, 0, 1]}),
    Family("olmo2"),
    Family("olmo3", _WINDOWS),
    Family("olmo"),
    Family(
        "granite",
        {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    *(Family(name, {"attention_multiplier": 0.2}) for name in _GRANITE),
    Family("glm4", {"partial_rotary_factor": 0.5}),
    Family("glm", {"partial_rotary_factor": 0.5}),
    Family("cohere", {"logit_scale": 0.25}),
    Family("cohere2", _WINDOWS),
    Family("cohere_compass_text", _WINDOWS | {"rope_parameters": dict.fromkeys(_ALTERNATING, _PLAIN_ROPE)}),
    Family("starcoder2", {"sliding_window": WINDOW}),
    Family("exaone4", _WINDOWS),
    Family("ernie4_5"),
    Family("seed_oss"),
    Family("ministral", _WINDOWS),
    Family("ministral3", {"rope_parameters": _SHORT_YARN | _SCALED_QUERIES}),
    Family("stablelm", {"use_qkv_bias": True}, ("head_dim",)),
    Family("nemotron"),
    Family("hunyuan_v1_dense"),
    Family("helium", {"num_key_value_heads": 4, "head_dim": 16}),
    Family("arcee"),
    Family("apertus"),
    Family("gpt_neox", {}, _NO_HEADS),
    Family("gpt2", {}, _NO_HEADS, renamed=True),
    Family("gpt_bigcode", {}, _NO_HEADS, renamed=True),
    Family("biogpt", {}, _NO_HEADS),
    Family("vaultgemma", _WINDOWS | {"query_pre_attn_scalar": 24}),
    Family("persimmon", {}, _NO_HEADS),
    Family("jais2"),
    Family("cwm", _WINDOWS, _TOKENS),
    Family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, _NO_HEADS),
    Family("qwen2_moe", _EXPERTS | _NARROW | {"shared_expert_intermediate_size": 48}),
    Family("glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1} | _NARROW),
    Family("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2} | _NARROW),
    Family("flex_olmo", _EXPERTS),
    Family("qwen3_moe", _EXPERTS | _NARROW | {"norm_topk_prob": True}),
    Family("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    Family("olmoe", _EXPERTS, ("head_dim",)),
    Family(
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": _SHORT_YARN}
        | {"swiglu_limit": 1.0},
    ),
    Family(
        "dots1", {"n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1} | _ONE_GROUP | _NARROW
    ),
    Family("bitnet", {}, ("head_dim",)),
    Family("codegen", {"rotary_dim": 8}, _NO_HEADS),
    Family("gptj", {"rotary_dim": 8}, _NO_HEADS),
    Family("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    Family("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1} | _EXPERTS | _NARROW),
    Family("qwen3_next", _DELTA_NET | _EXPERTS | _NARROW | {"shared_expert_intermediate_size": 48}, scale=1.5),
    Family("qwen3_5_text", _DELTA_NET, scale=1.5),
    Family("qwen3_5_moe_text", _DELTA_NET | _EXPERTS | _NARROW | {"shared_expert_intermediate_size": 48}, scale=1.5),
    Family("olmo_hybrid", _DELTA_NET, scale=1.5),
    Family("lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": WINDOW}),
    Family("bamba", _SPACE | {"attn_layer_indices": [1]}, scale=1.5),
    Family(
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
        | {**_SPACE, "mamba_n_groups": 1}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
        scale=1.5,
    ),
    Family("falcon_h1", _SPACE | _FALCON, scale=1.5),
    Family("nemotron_h", _NEMOTRON, scale=1.5),
    Family("lara_mini", {"sliding_window": WINDOW}, scale=1.5),
    Family("kimi_linear", _KIMI | {"q_lora_rank": None}, ("head_dim",), scale=1.5),
    Family("bailing_hybrid", _KIMI | {"head_dim": 16}, scale=1.5),
    Family("modernbert-decoder", dict.fromkeys(_TOKENS, 0), _NO_HEADS),
    *(Family(name, {"is_decoder": True}, _NO_HEADS) for name in _DECODING_ENCODERS),
    *(Family(name) for name in _PLAIN),
    Family(
        "deepseek_v2",
        _LATENT
        | _GROUPS
        | {"topk_method": "group_limited_greedy", "q_lora_rank": None, "rope_parameters": _LATENT_YARN},
        ("head_dim",),
    ),
    Family("deepseek_v3", _LATENT | _GROUPS | {"rope_parameters": _LATENT_YARN}, ("head_dim",)),
    *(Family(name, _LATENT | _GROUPS, ("head_dim",)) for name in ("sarvam_mla", "glm4_moe_lite", "axk1")),
    *(Family(name, _LATENT, ("head_dim",)) for name in ("minicpm3", "youtu")),
    # Modules that compute attention themselves.
    Family(
        "gpt_neo",
        {"attention_types": [[["local", "global", "local"], 1]], "window_size": WINDOW, "num_layers": 3}
        | {"num_heads": 4},
        (*_NO_HEADS, *_OTHER_NAMES),
    ),
    Family("gpt_neox_japanese", {"intermediate_multiple_size": 2}, (*_NO_HEADS, "intermediate_size")),
    Family("openai-gpt", {}, (*_NO_HEADS, "intermediate_size"), renamed=True),
    *(Family(name, {"is_decoder": True}, _NO_HEADS) for name in ("megatron-bert", "rembert", "roformer")),
    Family("big_bird", {"is_decoder": True, "attention_type": "original_full"}, _NO_HEADS),
    Family(
        "xglm",
        {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4},
        (*_NO_HEADS, *_OTHER_NAMES, "hidden_size"),
    ),
    Family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, ("head_dim",)),
    # Biases that are linear in positions, with slopes that 16 bits round.
    Family("bloom", {"hidden_size": 96, "n_layer": 3, "n_head": 6, "seq_length": 256}, (*_NO_HEADS, *_OTHER_NAMES)),
    Family(
        "mpt",
        {"d_model": 96, "n_heads": 6, "n_layers": 3, "expansion_ratio": 2, "max_seq_len": 256},
        (*_NO_HEADS, *_OTHER_NAMES, "hidden_size"),
    ),
    # Decoders of encoder-decoder models, alone.
    *(Family(name, _DECODER, (*_NO_HEADS, *_OTHER_NAMES, "hidden_size")) for name in _DECODERS),
    # Positions that begin after that of padding tokens.
    *(Family(name, {"is_decoder": True, "pad_token_id": 100}, _NO_HEADS) for name in _PADDED),
    Family("gemma3n_text", _GEMMA3N),
    # Layers with sinks beside layers without, and values that are smaller than keys.
    Family(
        "mimo_v2_flash",
        _WINDOWS
        | _NARROW
        | {"v_head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
)
# Text models within multimodal ones, whose other parts stay unread.
WRAPPERS: tuple[Family, ...] = (
    Family(
        "mllama",
        {"model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0},
        (*_TOKENS, "head_dim"),
        others=_TOWER,
    ),
    Family(
        "emu3",
        {"model_type": "emu3_text_model", "pad_token_id": 0},
        _TOKENS,
        others={"vq_config": {"base_channels": 32}, "vocabulary_map": {"<image>": 1}},
    ),
    Family("gemma3n", _GEMMA3N | {"model_type": "gemma3n_text"}, others=_HEARING),
    Family("fuyu", {"model_type": "persimmon"}, _NO_HEADS, others={"patch_size": 14}),
    Family("gemma3", _GEMMA3 | {"model_type": "gemma3_text"}, others=_TOWER),
    Family("gemma4", _GEMMA4 | {"model_type": "gemma4_text"}, others=_TOWER),
    Family("gemma4_unified", _GEMMA4 | {"model_type": "gemma4_unified_text"}, others=_TOWER),
    Family("got_ocr2", {"model_type": "qwen2"}, others=_TOWER),
    Family("mistral3", {"model_type": "mistral", "sliding_window": WINDOW}, others=_tower("pixtral")),
    Family("llava", {"model_type": "llama"}, others=_tower("clip_vision_model")),
    Family("llava_next", {"model_type": "mistral", "sliding_window": WINDOW}, others=_tower("clip_vision_model")),
    Family("llava_onevision", {"model_type": "qwen2"}, others=_TOWER),
    Family("vipllava", {"model_type": "llama"}, others=_tower("clip_vision_model")),
    Family("internvl", {"model_type": "qwen2"}, others=_TOWER),
    Family("idefics3", {"model_type": "llama"}, others=_TOWER),
    Family("smolvlm", {"model_type": "llama"}, others=_TOWER),
    Family("ovis2", {"model_type": "qwen2"}, others=_TOWER),
    Family("lighton_ocr", {"model_type": "qwen3"}, others=_TOWER),
    Family("qwen2_vl", _NARROW_MROPE, ("head_dim",), others=_TOWER),
    Family("qwen2_5_vl", _NARROW_MROPE, ("head_dim",), others=_TOWER),
    Family("qwen3_vl", {}, others=_TOWER),
    Family("qwen3_5", _DELTA_NET | {"model_type": "qwen3_5_text"}, others=_TOWER, scale=1.5),
    Family(
        "qwen3_5_moe",
        _DELTA_NET | _EXPERTS | _NARROW | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 48},
        others=_TOWER,
        scale=1.5,
    ),
)
# The families whose variants cover all others' ops: textbook; offset norms, soft caps, windows of some layers; packed
# weights; norms behind blocks; partial interleaved rope; layer norms and no gate; sinks and experts of all kinds.
IN_TESTS = ("qwen3", "gemma3_text", "phi3", "olmo2", "glm4", "starcoder2", "gpt_oss")


def family(name: str) -> Family:
    """Return the family of this name. Raises ValueError for an unknown name."""
    every = (*FAMILIES, *WRAPPERS)
    found = next((one for one in every if one.name == name), None)
    if found is None:
        raise ValueError(f"family is {name!r}; allowed: {', '.join(one.name for one in every)}")
    return found


class _Towers:
    """Stands in for AutoModel where a vision tower's package (timm) is missing: the tower is a small linear layer."""

    @staticmethod
    def from_config(config: Any, **options: Any) -> Any:
        from transformers import AutoModel

        return torch.nn.Linear(2, 2) if hasattr(config, "architecture") else AutoModel.from_config(config, **options)


@contextmanager
def _towers_without_packages(kind: str) -> Iterator[None]:
    """Let Gemma 3n be built without timm, inside a `with` block; text reaches no tower."""
    if kind != "gemma3n" or find_spec("timm") is not None:
        yield
        return
    module = import_module("transformers.models.gemma3n.modeling_gemma3n")
    before, module.AutoModel = module.AutoModel, _Towers  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.AutoModel = before  # type: ignore[attr-defined]


def write_checkpoint(folder: Path, case: Family, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Write a random checkpoint of that dtype, and return the model as transformers loads it, in fp32.

    Nothing is left at zero or one, and matrices are large enough for peaked distributions.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(case.name, **case.config())
    with _towers_without_packages(case.name):
        model: Any = _auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, case.scale / math.sqrt(parameter.shape[-1]), generator=generator)
    model.to(dtype).save_pretrained(folder)
    return load_oracle(folder, torch.float32)


def load_oracle(folder: Path, dtype: torch.dtype) -> Any:
    """Return the checkpoint's model with transformers' own attention and plain experts.

    The attention materialises every mask; only these experts support float64.
    """
    from transformers import AutoConfig

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = AutoConfig.from_pretrained(folder)
    with _towers_without_packages(config.model_type):
        model: Any = _auto_class(config).from_pretrained(folder, dtype=dtype, **plain)
    return model.eval().requires_grad_(False)


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if config is config.get_text_config() else AutoModelForImageTextToText
