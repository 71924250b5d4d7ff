"""Modules that the textbook's decoder-only models share, and the stack that applies decoder layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import ModelConfig

# The compiler relies on all decoder layers being applied in the same way.


class LayerStack(nn.ModuleList):
    """A stack of decoder layers, each of which is applied to the previous layer's result.

    only: numbers of the layers to apply; None: all. The compiler sets `only` to trace just a few of several identical
    layers (graphs/compiler/traced_layers.py). Layers that differ in an attribute, such as a layer number, are not
    identical.
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
        """Apply the layers, or those in self.only, in order. Returns the last layer's result [T, D].

        kv_caches: one for each layer of the stack; raises ValueError for any other number.
        """
        if len(kv_caches) != len(self):
            raise ValueError(f"there are {len(kv_caches)} KV caches for {len(self)} layers")
        for layer in range(len(self)) if self.only is None else self.only:
            x_TD = self[layer](x_TD, cos_T1d, sin_T1d, inputs, kv_caches[layer])
        return x_TD


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in fp32.

    The result is rounded to the input's dtype before it is multiplied by the weight, as in transformers.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fp32 = x.float()
        mean_square = x_fp32.pow(2).mean(-1, keepdim=True)
        normalised = x_fp32 * torch.rsqrt(mean_square + self.eps)
        return self.weight * normalised.to(x.dtype)


def rotate(x_THd: torch.Tensor, cos_T1d: torch.Tensor, sin_T1d: torch.Tensor) -> torch.Tensor:
    """Return x with rotary position embedding (Su et al., 2021), in the layout that pairs element i with i + d / 2."""
    first, second = x_THd.chunk(2, dim=-1)
    rotated_THd = torch.cat((-second, first), dim=-1)
    return x_THd * cos_T1d + rotated_THd * sin_T1d


class SwiGLU(nn.Module):
    """Gated MLP (Shazeer, 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=config.mlp_bias, dtype=config.dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=config.mlp_bias, dtype=config.dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=config.mlp_bias, dtype=config.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TI = self.gate_proj(x_TD)
        up_TI = self.up_proj(x_TD)
        hidden_TI = F.silu(gate_TI) * up_TI
        return self.down_proj(hidden_TI)
