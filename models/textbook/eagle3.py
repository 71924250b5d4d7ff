"""The EAGLE-3 draft head: one decoder layer that drafts from the target model's hidden states.

Method: Li, Wei, Zhang and Zhang, "EAGLE-3: scaling up inference acceleration of large language models via training-time
test", 2025.

At each position the layer reads a feature vector and the embedding of the next token. The features are computed from
the inputs of some of the target model's layers. For positions that the target model has not computed yet, the features
are the head's own hidden states.
"""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs, StepTensor
from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.textbook.layers import RMSNorm, SwiGLU
from compiled_engine.models.textbook.llama import Attention
from compiled_engine.models.textbook.rope import RotaryEmbedding

# The engine's name of the architecture. checkpoint/eagle3_folder.py lists the names in checkpoints.
EAGLE3 = "LlamaForCausalLMEagle3"
FEATURES = "features_TD"


def head_step_tensors(model: ModelConfig) -> tuple[StepTensor, ...]:
    """Return the declaration of the additional input of a draft head's forward: one feature vector per token.

    Returns () if the model is not a draft head.
    """
    return () if model.head is None else (StepTensor(FEATURES, ("tokens", model.hidden_size), model.dtype),)


class Eagle3Attention(Attention):
    """Attention that reads embedding and features, concatenated: q, k and v have 2 * hidden_size inputs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self, name).out_features
            wide = nn.Linear(2 * config.hidden_size, rows, bias=config.qkv_bias, dtype=config.dtype)
            setattr(self, name, wide)


class Eagle3Layer(nn.Module):
    def __init__(self, config: ModelConfig, head: HeadConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_layernorm, self.hidden_norm = RMSNorm(*sizes), RMSNorm(*sizes)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(*sizes)
        self.mlp = SwiGLU(config)
        self.norm_before_residual = head.norm_before_residual

    def forward(
        self,
        embedded_TD: torch.Tensor,
        features_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_cache_N2PKd: torch.Tensor,
    ) -> torch.Tensor:
        normalised_TD = self.hidden_norm(features_TD)
        both_TE = torch.cat((self.input_layernorm(embedded_TD), normalised_TD), dim=-1)
        residual_TD = normalised_TD if self.norm_before_residual else features_TD
        x_TD = residual_TD + self.self_attn(both_TE, cos_T1d, sin_T1d, inputs, kv_cache_N2PKd)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head with the engine's interface. Parameters are named as in speculators' checkpoints."""

    def __init__(self, config: ModelConfig, head: HeadConfig) -> None:
        super().__init__()
        D, E = config.hidden_size, head.num_aux_layers * head.target_size
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, D, dtype=config.dtype))
        self.input_norm = RMSNorm(E, config.rms_norm_eps, config.dtype) if head.norm_before_fc else nn.Identity()
        self.fc = nn.Linear(E, D, bias=False, dtype=config.dtype)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.dtype)
        self.layers = nn.ModuleList([Eagle3Layer(config, head)])
        self.norm = RMSNorm(D, config.rms_norm_eps, config.dtype)
        self.lm_head = nn.Linear(D, head.vocab_size, bias=False, dtype=config.dtype)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        features_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Return hidden states [T, D] before the final norm: the features for drafting the following token.

        input_ids_T: for each position, the next token. features_TD: for each position, the result of `combine` for the
        target model's hidden states there or, if the target model has not computed them, an earlier result of
        `forward`.
        """
        cos_T1d, sin_T1d = self.rotary_emb(positions_T)
        embedded_TD = self.embed_tokens(input_ids_T)
        hidden_TD: torch.Tensor = self.layers[0](
            embedded_TD, features_TD, cos_T1d, sin_T1d, attention_inputs, kv_caches[0]
        )
        return hidden_TD

    def combine(self, aux_hidden_states_TE: torch.Tensor) -> torch.Tensor:
        """Return features [T, D]. aux_hidden_states_TE: several layers' inputs in the target model, concatenated."""
        features_TD: torch.Tensor = self.fc(self.input_norm(aux_hidden_states_TE))
        return features_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, Vd] over the draft vocabulary, for the token after the input token.

        hidden_RD: rows of the result of `forward`.
        """
        logits_RV: torch.Tensor = self.lm_head(self.norm(hidden_RD))
        return logits_RV
