"""From a checkpoint folder to a model: read the config, then build the architecture that it names."""

from __future__ import annotations

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.config_reader import read_model_config
from compiled_engine.models.families import FAMILIES, CausalLM

__all__ = ["CausalLM", "build_model", "read_model_config"]


def build_model(config: ModelConfig) -> CausalLM:
    """The model on the meta device, in config.dtype; `parameters.materialize` gives its parameters memory.

    It has `forward(input_ids_T, positions_T, attention_inputs, kv_caches) -> hidden_TD` and
    `logits(hidden_RD) -> logits_RV`. Buffers (rotary frequencies) are fp32 on the CPU.
    """
    with torch.device("meta"):
        model = FAMILIES[config.architecture].model(config)
    return model.eval().requires_grad_(False)
