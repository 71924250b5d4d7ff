"""Models and options whose starts launch every kind of kernel, in the sizes of published models, with few layers.

A model is a config.json alone: its weights would be random, and nothing is computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiled_engine.options import EngineOptions

MOST_TOKENS = 4096
# The same for all models: kernels of sampling, which depend on it, are compiled once.
VOCABULARY = 151_936
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2 * MOST_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN3: dict[str, Any] = _BASE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
}
_HEAD = {
    "vocab_size": VOCABULARY,
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}
_SMALL_QWEN3 = _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
_EXPERTS = _BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_DELTA_RULES = _BASE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
}
_MAMBA = _BASE | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "hidden_size": 3072,
    "intermediate_size": 12_288,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "rope_theta": 1e11,
}
_LATENT = _BASE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": _ROPE,
}
_WIDE_HEADS = _BASE | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SINKS = _BASE | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
_ENCODER = _BASE | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
_IMAGES = _BASE | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151_655,
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "depth": 2,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
    "text_config": _BASE
    | {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
}
_PROCESSOR = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12_845_056},
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen2_5_VLProcessor",
}
_SPEECH = _BASE | {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 1280,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
    "decoder_start_token_id": 2,
}


def _scheme(section: str, bits: int, kind: str, strategy: str, inputs: dict[str, Any] | None, **weights: Any) -> Any:
    """Return the quantization_config of a format of compressed-tensors."""
    values = {"num_bits": bits, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": values | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": None if inputs is None else values | inputs,
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": section, "config_groups": {"group_0": group}} | {
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


_INT8 = _scheme("int-quantized", 8, "int", "channel", {"strategy": "token", "dynamic": True})


@dataclass(frozen=True)
class Start:
    """A model's config.json, and the options with which it is started.

    processor: the image processor's settings. head: the config.json of a head that drafts, in the folder `head`.
    """

    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] | None = None
    head: dict[str, Any] | None = None

    def written(self, folder: Path) -> EngineOptions:
        """Write the folder of the model, and return the options of its start."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        options = self.options
        if self.processor is not None:
            (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        if self.head is not None:
            (folder / "head").mkdir(exist_ok=True)
            (folder / "head" / "config.json").write_text(json.dumps(self.head))
            drafts = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
            options = options | {"speculative_config": drafts}
        return EngineOptions(
            model=folder,
            device="cuda:0",
            load_format="dummy",
            skip_tokenizer_init=True,
            compile_cache=False,
            **options,
        )


STARTS: dict[str, Start] = {
    "bfloat16": Start(_QWEN3),
    "float32": Start(_SMALL_QWEN3, {"dtype": "float32"}),
    "fp8 weights": Start(_QWEN3, {"quantization": "fp8"}),
    "fp8 weights in blocks": Start(_QWEN3, {"quantization": "fp8_block"}),
    "int8 weights": Start(_QWEN3 | {"quantization_config": _INT8}),
    "int4 weights": Start(_QWEN3, {"quantization": "int4"}),
    "fp8 cache": Start(_QWEN3, {"kv_cache_dtype": "fp8"}),
    "int8 cache": Start(_QWEN3, {"kv_cache_dtype": "int8"}),
    "drafts": Start(_QWEN3, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "draft head": Start(_QWEN3 | {"num_hidden_layers": 4}, head=_HEAD),
    "adapters": Start(_QWEN3, {"enable_lora": True, "max_loras": 4}),
    "experts": Start(_EXPERTS),
    "experts in mxfp4, sinks": Start(_SINKS),
    "delta rules": Start(_DELTA_RULES),
    "Mamba 2": Start(_MAMBA),
    "latent attention": Start(_LATENT),
    "wide heads": Start(_WIDE_HEADS),
    "encoder": Start(_ENCODER, {"runner": "pooling"}),
    "images": Start(_IMAGES, processor=_PROCESSOR),
    # Whisper stores heads before tokens, so that each number of tokens has kernels of its own.
    "speech": Start(_SPEECH, {"max_num_seqs": 4}),
}
