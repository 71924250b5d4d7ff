"""Qwen3: Llama with an RMSNorm over each head of q and k before the rotary embedding."""

from __future__ import annotations

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook import llama
from compiled_engine.models.textbook.layers import RMSNorm


class Attention(llama.Attention):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)

    def normalise_heads(self, q_THd: torch.Tensor, k_TKd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q_THd), self.k_norm(k_TKd)


class Qwen3ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, llama.LlamaModel(config, Attention))
