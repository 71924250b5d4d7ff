"""Gemma 3 (text): Gemma 2 with norms of q and k, and with other rotary frequencies in sliding-window layers."""

from __future__ import annotations

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import ModelConfig, RopeConfig
from compiled_engine.models.textbook import gemma2, llama
from compiled_engine.models.textbook.rope import RotaryEmbedding


class Attention(llama.Attention):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = gemma2.RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)
        self.k_norm = gemma2.RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)

    def normalise_heads(self, q_THd: torch.Tensor, k_TKd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q_THd), self.k_norm(k_TKd)


class Gemma3Model(gemma2.Gemma2Model):
    """Gemma 3 without the output projection.

    All layers receive two pairs of cos and sin, global and local. Sliding-window layers use the local pair, others the
    global pair.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Attention)
        theta = config.local_rope_theta
        local_rope = config.rope if theta is None else RopeConfig(theta)
        self.rotary_emb_local = RotaryEmbedding(local_rope, config.head_dim, config.dtype)

    def make_layer(self, config: ModelConfig, layer: int, attention: type[llama.Attention]) -> gemma2.DecoderLayer:
        is_local = config.sliding_windows[layer] is not None
        return (LocalLayer if is_local else GlobalLayer)(config, layer, attention)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        angle_lengths_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(input_ids_T) * self.embedding_scale
        cos, sin = zip(self.rotary_emb(positions_T, angle_lengths_T), self.rotary_emb_local(positions_T), strict=True)
        x_TD = self.layers(x_TD, cos, sin, inputs, kv_caches)
        return self.norm(x_TD)


Angles = tuple[torch.Tensor, torch.Tensor]


class GlobalLayer(gemma2.DecoderLayer):
    def forward(  # type: ignore[override]
        self, x_TD: torch.Tensor, cos: Angles, sin: Angles, inputs: AttentionInputs, kv_cache_N2PKd: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(x_TD, cos[0], sin[0], inputs, kv_cache_N2PKd)


class LocalLayer(gemma2.DecoderLayer):
    def forward(  # type: ignore[override]
        self, x_TD: torch.Tensor, cos: Angles, sin: Angles, inputs: AttentionInputs, kv_cache_N2PKd: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(x_TD, cos[1], sin[1], inputs, kv_cache_N2PKd)


class Gemma3ForCausalLM(gemma2.Gemma2ForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Gemma3Model(config))
