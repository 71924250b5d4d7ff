"""A stack of decoder layers, which are all applied in the same way; the compiler relies on that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs


class LayerStack(nn.ModuleList):
    """Decoder layers, each applied to the previous layer's result.

    The compiler traces few of the identical layers (graphs/compiler/traced_layers.py), selected by `only` during a
    trace. An attribute that differs from layer to layer, such as a number, makes the layers differ: then all are
    traced.
    """

    only: Sequence[int] | None = None

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_T1d: torch.Tensor,
        sin_T1d: torch.Tensor,
        inputs: AttentionInputs,
        kv_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Raises ValueError unless there is a cache for each layer."""
        if len(kv_caches) != len(self):
            raise ValueError(f"there are {len(kv_caches)} KV caches for {len(self)} layers")
        for layer in range(len(self)) if self.only is None else self.only:
            x_TD = self[layer](x_TD, cos_T1d, sin_T1d, inputs, kv_caches[layer])
        return x_TD
