"""Biases of attention scores by relative position, from a table of buckets (T5, Raffel et al. 2020).

The bias of a score depends on its head and on the bucket of the distance between query and key. Near distances have a
bucket each, further ones share some, and from a certain distance on all keys on a side have the same one. So a table
with a column for each distance up to that one has all biases. It is an argument of the attention op (see
attention.op.packed_attention), where transformers computes a bias for every pair of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiled_engine.models.foreign.observation import UnsupportedModelError

# transformers' default of `max_distance`, from which on all keys on a side are in one bucket.
_FARTHEST = 128
_CHECKED = 4096  # distances up to which that must hold


class BiasTable:
    """Mixin for MPNet's stack of layers: computes the table of biases instead of a bias for each pair of tokens."""

    relative_attention_bias: nn.Embedding  # [buckets, H]
    buckets_W: torch.Tensor  # int64, the bucket of each relative position from -_FARTHEST to _FARTHEST

    def compute_position_bias(self, x: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        """Return the table [H, W], which the stack passes to each layer as its `position_bias`."""
        return self.relative_attention_bias(self.buckets_W).t().contiguous()

    def hold_buckets(self) -> None:
        """Register the buffer of buckets on the meta device. `fill_buckets` fills it later."""
        own: Any = self
        buckets_W = torch.empty(2 * _FARTHEST + 1, dtype=torch.int64, device="meta")
        own.register_buffer("buckets_W", buckets_W, persistent=False)

    def fill(self) -> None:
        """Compute the buckets with transformers' function.

        Raises UnsupportedModelError if buckets differ beyond _FARTHEST.
        """
        own: Any = self
        buckets = own.relative_position_bucket(torch.arange(-_CHECKED, _CHECKED + 1, device="cpu"))
        before, self.buckets_W, after = buckets.split((_CHECKED - _FARTHEST, 2 * _FARTHEST + 1, _CHECKED - _FARTHEST))
        if (before != self.buckets_W[0]).any() or (after != self.buckets_W[-1]).any():
            raise UnsupportedModelError(f"its buckets of relative positions differ beyond {_FARTHEST} tokens")
        self.buckets_W = self.buckets_W.clone()


def fill_buckets(model: nn.Module) -> None:
    """Fill the buffers of the model's BiasTable modules. A model without such modules is not changed."""
    for module in model.modules():
        if isinstance(module, BiasTable):
            module.fill()
