"""Gemma 2: Llama with norms before and after each block, a GELU gate, and soft caps on attention scores and logits.

RMSNorm scales by 1 + weight, and embeddings are multiplied by the square root of the hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook import layers, llama
from compiled_engine.models.textbook.layers import LayerStack
from compiled_engine.models.textbook.rope import RotaryEmbedding


class RMSNorm(layers.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32, before the result is rounded to the input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fp32 = x.float()
        mean_square = x_fp32.pow(2).mean(-1, keepdim=True)
        normalised = x_fp32 * torch.rsqrt(mean_square + self.eps)
        return (normalised * (1.0 + self.weight.float())).to(x.dtype)


class GeGLU(layers.SwiGLU):
    """Gated MLP (Shazeer, 2020) with the tanh approximation of GELU: down(gelu(gate(x)) * up(x))."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TI = self.gate_proj(x_TD)
        up_TI = self.up_proj(x_TD)
        hidden_TI = F.gelu(gate_TI, approximate="tanh") * up_TI
        return self.down_proj(hidden_TI)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, attention: type[llama.Attention]) -> None:
        super().__init__()
        norm = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.mlp = GeGLU(config)
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_cache_N2PKd: torch.Tensor,
    ) -> torch.Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), cos_T1d, sin_T1d, inputs, kv_cache_N2PKd)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        x_TD = x_TD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TD)))
        return x_TD


class Gemma2Model(nn.Module):
    def __init__(self, config: ModelConfig, attention: type[llama.Attention] = llama.Attention) -> None:
        super().__init__()
        embedding_VD = torch.empty(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD)
        # Rounded to the model's dtype, as in training.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=config.dtype, device="cpu").item()
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.dtype)
        self.layers = LayerStack(self.make_layer(config, layer, attention) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def make_layer(self, config: ModelConfig, layer: int, attention: type[llama.Attention]) -> DecoderLayer:
        return DecoderLayer(config, layer, attention)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        angle_lengths_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(input_ids_T) * self.embedding_scale
        cos_T1d, sin_T1d = self.rotary_emb(positions_T, angle_lengths_T)
        x_TD = self.layers(x_TD, cos_T1d, sin_T1d, inputs, kv_caches)
        return self.norm(x_TD)


class Gemma2ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: ModelConfig, model: nn.Module | None = None) -> None:
        super().__init__(config, Gemma2Model(config) if model is None else model)
        self.soft_cap = config.logit_soft_cap

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits_RV = self.lm_head(hidden_RD)
        if self.soft_cap:
            logits_RV = torch.tanh(logits_RV / self.soft_cap) * self.soft_cap
        return logits_RV
