"""Lists the textbook model classes by the architecture's name in config.json, and builds their models."""

from __future__ import annotations

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook.eagle3 import Eagle3Head
from compiled_engine.models.textbook.gemma2 import Gemma2ForCausalLM
from compiled_engine.models.textbook.gemma3 import Gemma3ForCausalLM
from compiled_engine.models.textbook.llama import LlamaForCausalLM
from compiled_engine.models.textbook.mtp import make_mtp_layer
from compiled_engine.models.textbook.phi3 import Phi3ForCausalLM
from compiled_engine.models.textbook.qwen3 import Qwen3ForCausalLM
from compiled_engine.models.textbook.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MiMoForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(config: ModelConfig) -> LlamaForCausalLM | Eagle3Head:
    """Build a textbook model or draft head on the meta device, in config.dtype.

    `parameters.materialize` allocates the parameters. The model has `forward(input_ids_T, positions_T,
    attention_inputs, kv_caches) -> hidden_TD` and `logits(hidden_RD) -> logits_RV`. The `forward` of a draft head also
    takes `features_TD`. An EAGLE-3 head also has `combine(aux_hidden_states_TE) -> features_TD`, where E is the number
    of elements of several layers' hidden states, concatenated. Buffers (rotary frequencies) are fp32 on the CPU.
    """
    head = config.head
    with torch.device("meta"):
        if head is not None and not head.is_mtp:
            return Eagle3Head(config, head).eval().requires_grad_(False)
        model = ARCHITECTURES[config.architecture](config).eval().requires_grad_(False)
    return model if head is None else make_mtp_layer(model, config)
