"""Qwen3: Llama, with an RMSNorm over each head of q and k before they are rotated."""

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

    def heads(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_THd, k_TKd, v_TKd = super().heads(x_TD)
        return self.q_norm(q_THd), self.k_norm(k_TKd), v_TKd


class Qwen3ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Attention)
