"""A layer for multi-token prediction (MTP), which some checkpoints contain to draft for their own model.

Method: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2.

At each position the layer reads the model's final hidden state and the embedding of the next token. Both are normalised
and projected to one vector, which passes through a decoder layer of the model's family and a norm. From the result, the
model's output projection computes the logits of the token after the next one. For positions that the model has not
computed yet, the layer's own result takes the place of the model's hidden state.

The layer is implemented as a model of the family with a single decoder layer, so that the code of all families serves
MTP too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import ModelConfig

# The model's last norm; the norms before the projection are copies of it.
NORM = "model.norm"
# Prefix of the parameters of `Projection`.
PROJECTION = "mtp"


class Projection(nn.Module):
    """Normalises embeddings and hidden states, and projects both to the inputs of the decoder layer."""

    def __init__(self, norm: nn.Module, config: ModelConfig) -> None:
        """Create the module. Its two norms are copies of `norm`, a norm of the model."""
        super().__init__()
        assert config.head is not None
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=config.dtype)
        self.hidden_first, self.shares_norm = config.head.hidden_first, config.head.shares_norm

    def forward(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
        """Return the projections [T, D].

        hidden_TD: the result of the model's last norm. norm_D: the weight of this norm; only used if the layer shares
        the norm.
        """
        if self.shares_norm:
            # Division by the weight gives the states before the norm, up to a factor that hidden_norm removes. Where
            # the weight is 0, these states are unknown.
            hidden_TD = torch.where(norm_D == 0, 0.0, hidden_TD / norm_D)
        both = self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)
        projected_TD: torch.Tensor = self.proj(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))
        return projected_TD


class MtpLayer:
    """Mixin that turns a causal language model with a single layer into an MTP layer.

    The model's class must follow this mixin in the list of base classes, and must have `embed` and `decode`.
    """

    mtp: Projection
    model: Any
    embed: Any
    decode: Any

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention_inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
        features_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Return hidden states [T, D] after the final norm: the features for drafting the following token.

        input_ids_T: for each position, the next token. features_TD: for each position, the model's final hidden state
        or, if the model has not computed it, an earlier result of `forward`.
        """
        projected_TD = self.mtp(self.embed(input_ids_T), features_TD, self.model.norm.weight)
        hidden_TD: torch.Tensor = self.decode(projected_TD, positions_T, attention_inputs, kv_caches)
        return hidden_TD


def make_mtp_layer(model: Any, config: ModelConfig) -> Any:
    """Turn a causal language model with a single layer into an MTP layer, in place. Returns the model.

    model: a textbook model, a model with transformers' code, or a Skeleton. The parameters are on the meta device, and
    keep their names.
    """
    with torch.device("meta"):
        model.mtp = Projection(model.get_submodule(NORM), config).eval().requires_grad_(False)
    theirs = type(model)
    model.__class__ = type(theirs.__name__, (MtpLayer, theirs), {"__module__": theirs.__module__})
    return model
