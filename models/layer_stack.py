"""Decoder layers one after another, for models and for the compiler, which knows that they are treated alike."""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs


class LayerStack(nn.ModuleList):
    """Decoder layers, each applied to what the one before it returned: layers that are alike do alike.

    So the compiler need not trace them all (graphs/repeated_layers.py).
    """

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        for layer, kv_cache_N2PKd in zip(self, kv_caches, strict=True):
            x_TD = layer(x_TD, cos_T1d, sin_T1d, inputs, kv_cache_N2PKd)
        return x_TD
