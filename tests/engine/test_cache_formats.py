"""Formats of the KV cache: how its tensors store keys and values."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.kv_format import BY_OPTION, cache_dtype, has_scales, head_dim_of, head_width, is_coded


@pytest.mark.parametrize(
    ("option", "dtype", "coded", "width"),
    [
        ("auto", torch.bfloat16, False, 24),
        ("int8", torch.uint8, True, 26),  # a byte for each element, and two of a scale
        ("int8_per_token_head", torch.uint8, True, 26),
        ("fp8", torch.float8_e4m3fn, True, 24),
        ("fp8_e4m3", torch.float8_e4m3fn, True, 24),
    ],
)
def test_a_head_of_24_elements(option: str, dtype: torch.dtype, coded: bool, width: int) -> None:
    found = cache_dtype(BY_OPTION[option], torch.bfloat16)
    assert found is dtype
    assert (is_coded(found), has_scales(found)) == (coded, width > 24)
    assert head_width(found, 24) == width
    assert head_dim_of(torch.empty(1, 2, 4, 1, width, dtype=found)) == 24


@pytest.mark.parametrize(
    ("option", "width"),
    [("auto", 24), *((name, 16 + 2 * 8 + 2) for name in ("int8", "fp8"))],  # two bytes: rotated elements, and a scale
)
def test_a_latent_of_16_elements_and_a_rotated_part_of_8(option: str, width: int) -> None:
    found = cache_dtype(BY_OPTION[option], torch.bfloat16)
    assert head_width(found, 24, 16) == width
    assert head_dim_of(torch.empty(1, 1, 4, 1, width, dtype=found), 16) == 24
