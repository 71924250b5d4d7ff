"""The textbook architectures by the name that config.json gives them."""

from __future__ import annotations

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook.llama import LlamaForCausalLM
from compiled_engine.models.textbook.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The model on the meta device, in config.dtype; `parameters.materialize` gives its parameters memory.

    It has `forward(input_ids_T, positions_T, attention_inputs, kv_caches) -> hidden_TD` and
    `logits(hidden_RD) -> logits_RV`. Buffers (rotary frequencies) are fp32 on the CPU.
    """
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config)
    return model.eval().requires_grad_(False)
