"""The table of biases by relative position, against transformers' bias of each pair of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetConfig, MPNetEncoder

from compiled_engine.models.foreign.compat import mixed
from compiled_engine.models.foreign.observation import UnsupportedModelError
from compiled_engine.models.foreign.relative_biases import BiasTable, fill_buckets

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}


def table_of(encoder: MPNetEncoder) -> torch.Tensor:
    own: Any = encoder
    own.__class__ = mixed(BiasTable, type(encoder))
    own.hold_buckets()
    fill_buckets(torch.nn.Sequential(own))
    return own.compute_position_bias(torch.empty(1, 5, 24))


def test_the_table_has_the_bias_of_each_pair() -> None:
    torch.manual_seed(1)
    encoder, length = MPNetEncoder(MPNetConfig(**SIZES)).requires_grad_(False), 400
    expected_HLL = encoder.compute_position_bias(torch.empty(1, length, 24))[0]
    table_HW = table_of(encoder)
    assert table_HW.shape == (3, 257)
    assert table_HW.is_contiguous()
    positions = torch.arange(length)
    columns = (positions - positions[:, None]).clamp(-128, 128) + 128
    assert torch.equal(table_HW[:, columns], expected_HLL)


class FarBuckets(MPNetEncoder):
    @staticmethod
    def relative_position_bucket(relative_position: torch.Tensor, num_buckets: int = 32) -> torch.Tensor:
        return MPNetEncoder.relative_position_bucket(relative_position, num_buckets, max_distance=512)


def test_buckets_that_differ_beyond_the_table_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its buckets of relative positions differ beyond 128 tokens"):
        table_of(FarBuckets(MPNetConfig(**SIZES)))
