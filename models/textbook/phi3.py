"""Phi-3 and Phi-4: Llama with the weights of q, k and v in one tensor, and those of gate and up in another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import attention
from compiled_engine.config import ModelConfig
from compiled_engine.models.textbook import llama
from compiled_engine.models.textbook.layers import rotate


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, H, K, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = nn.Linear(D, (H + 2 * K) * d, bias=config.qkv_bias, dtype=config.dtype)
        self.o_proj = nn.Linear(H * d, D, bias=config.attention_out_bias, dtype=config.dtype)
        self.heads, self.head_dim = [H, K, K], d
        self.packed = dict.fromkeys(("qkv_proj.weight", "qkv_proj.bias"), (H * d, K * d, K * d))
        self.sliding_window = config.sliding_windows[layer]

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_cache_N2PKd: torch.Tensor,
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x_TD).split([heads * self.head_dim for heads in self.heads], dim=-1)
        q_THd, k_TKd, v_TKd = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        q_THd = rotate(q_THd, cos_T1d, sin_T1d)
        k_TKd = rotate(k_TKd, cos_T1d, sin_T1d)
        scale = self.head_dim**-0.5
        out_THd = attention(q_THd, k_TKd, v_TKd, kv_cache_N2PKd, inputs, scale, self.sliding_window)
        return self.o_proj(out_THd.flatten(-2))


class PackedSwiGLU(nn.Module):
    """Gated MLP (Shazeer, 2020) with gate and up computed by one linear."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False, dtype=config.dtype)
        self.packed = {"gate_up_proj.weight": (intermediate, intermediate)}
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=config.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate_TI) * up_TI)


class Phi3ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, llama.LlamaModel(config, Attention, PackedSwiGLU))
