"""The head of a pooling model: linear layers that are applied to pooled hidden states, in fp32."""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.pooling import Dense


class Pooler(nn.Module):
    """Maps pooled hidden states [R, W] to results [R, L] by linear layers with activations.

    The final activation, which a request may choose, is applied elsewhere.
    """

    def __init__(self, head: tuple[Dense, ...]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(each.in_size, each.out_size, bias=each.bias, dtype=torch.float32) for each in head
        )
        self.activations = [getattr(nn, each.activation)() for each in head]

    def forward(self, pooled_RW: torch.Tensor) -> torch.Tensor:
        for linear, activation in zip(self.linears, self.activations, strict=True):
            pooled_RW = activation(linear(pooled_RW))
        return pooled_RW
