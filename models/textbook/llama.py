"""Llama, Mistral, Qwen2 and MiMo. They differ only in biases and sliding windows, which the config states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import attention
from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook.layers import LayerStack, RMSNorm, SwiGLU, rotate
from compiled_engine.models.textbook.rope import RotaryEmbedding


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, heads = config.hidden_size, config.heads_of(layer)
        H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self.q_proj = nn.Linear(D, H * d, bias=config.qkv_bias, dtype=config.dtype)
        self.k_proj = nn.Linear(D, K * d, bias=config.qkv_bias, dtype=config.dtype)
        self.v_proj = nn.Linear(D, K * d, bias=config.qkv_bias, dtype=config.dtype)
        self.o_proj = nn.Linear(H * d, D, bias=config.attention_out_bias, dtype=config.dtype)
        self.num_heads, self.num_kv_heads, self.head_dim = H, K, d
        self.sliding_window = config.sliding_windows[layer]
        self.scale = d**-0.5 if config.attention_scale is None else config.attention_scale
        self.soft_cap = config.attention_soft_cap

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_cache_N2PKd: torch.Tensor,
    ) -> torch.Tensor:
        q_THd = self.q_proj(x_TD).unflatten(-1, (self.num_heads, self.head_dim))
        k_TKd = self.k_proj(x_TD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_TKd = self.v_proj(x_TD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        q_THd, k_TKd = self.normalise_heads(q_THd, k_TKd)
        q_THd = rotate(q_THd, cos_T1d, sin_T1d)
        k_TKd = rotate(k_TKd, cos_T1d, sin_T1d)
        scoring = self.scale, self.sliding_window, self.soft_cap
        out_THd = attention(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, inputs, *scoring)
        return self.o_proj(out_THd.flatten(-2))

    def normalise_heads(self, q_THd: torch.Tensor, k_TKd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k unchanged. Models such as Qwen3 override this method to normalise each head."""
        return q_THd, k_TKd


# Builds an attention or MLP module, given the config and the layer's index.
MakeModule = Callable[[ModelConfig, int], nn.Module]


def make_swiglu(config: ModelConfig, layer: int) -> nn.Module:
    """Build the MLP of a layer, a SwiGLU, which is the same for all layers."""
    return SwiGLU(config)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, attention: MakeModule, mlp: MakeModule) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp(config, layer)

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_cache_N2PKd: torch.Tensor,
    ) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_T1d, sin_T1d, inputs, kv_cache_N2PKd)
        x_TD = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD


class LlamaModel(nn.Module):
    """Llama without the output projection: embedding, decoder layers and final norm.

    attention, mlp: build the attention module and the MLP of each layer.
    """

    def __init__(self, config: ModelConfig, attention: MakeModule = Attention, mlp: MakeModule = make_swiglu) -> None:
        super().__init__()
        # nn.Embedding(V, D) would initialise the weight, which on the meta device imports the compiler (0.8 s).
        embedding_VD = torch.empty(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.dtype)
        self.layers = LayerStack(DecoderLayer(config, layer, attention, mlp) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        angle_lengths_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.decode(self.embed_tokens(input_ids_T), positions_T, inputs, kv_caches, angle_lengths_T)

    def decode(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        angle_lengths_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D] after the final norm, from the inputs [T, D] of the first layer."""
        cos_T1d, sin_T1d = self.rotary_emb(positions_T, angle_lengths_T)
        x_TD = self.layers(x_TD, cos_T1d, sin_T1d, inputs, kv_caches)
        return self.norm(x_TD)


class LlamaForCausalLM(nn.Module):
    """Llama with the engine's interface. Parameters are named as in checkpoints.

    model: all modules except the output projection; None: a LlamaModel.
    """

    def __init__(self, config: ModelConfig, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model: Any = LlamaModel(config) if model is None else model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.dtype)
        if config.tie_word_embeddings:
            embed_tokens: Any = self.model.embed_tokens
            self.lm_head.weight = embed_tokens.weight

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        angle_lengths_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D] after the final norm.

        kv_caches: for each layer [N, 2, P, K, d], N blocks of P positions with K KV heads of d elements. This step's
        keys and values are written into the caches. angle_lengths_T: see RotaryEmbedding; None unless angles depend on
        the lengths of requests.
        """
        return self.model(input_ids_T, positions_T, attention_inputs, kv_caches, angle_lengths_T)

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, D] of tokens."""
        embedded_TD: torch.Tensor = self.model.embed_tokens(input_ids_T)
        return embedded_TD

    def decode(
        self,
        embedded_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return hidden states [T, D] as `forward` does, but from embeddings [T, D] instead of token ids."""
        hidden_TD: torch.Tensor = self.model.decode(embedded_TD, positions_T, attention_inputs, kv_caches)
        return hidden_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in the model's dtype. hidden_RD: the hidden states to compute logits for."""
        return self.lm_head(hidden_RD)
