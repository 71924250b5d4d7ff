"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of all or most MLPs."""

from __future__ import annotations

from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook import llama, qwen3
from compiled_engine.models.textbook.experts import SparseMLP
from compiled_engine.models.textbook.layers import SwiGLU


def make_mlp(config: ModelConfig, layer: int) -> nn.Module:
    """Build the mixture of experts of a layer, or a dense MLP if the config lists the layer as dense."""
    if layer in config.experts.dense_layers:
        return SwiGLU(config)
    return SparseMLP(config, config.experts)


class Qwen3MoeForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, llama.LlamaModel(config, qwen3.Attention, make_mlp))
