"""Scales of keys and values in FP8, as checkpoints state them: one for a layer's keys and one for its values, or one
for each K/V head.

Spellings: `self_attn.k_scale` of compressed-tensors, `self_attn.k_proj.k_scale` of modelopt, and
`self_attn.k_proj.output_scale` of older files; `v` likewise. A key is its code times the scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from compiled_engine.kv_format import LEAST_SCALE
from compiled_engine.passes.framework.parameter import Parameter

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$")


def find_kv_scales(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[int, str], str]:
    """Return the names of scales by layer and kind, `k` or `v`."""
    found = {}
    for name in tensors:
        if match := _NAME.match(name):
            found[int(match[1]), match[2] or match[3]] = name
    return found


def kv_scales_of(
    leaf: Parameter,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[tuple[int, str], str],
    num_kv_heads: int,
    rank: int,
    num_ranks: int,
) -> torch.Tensor:
    """Return the values of a parameter with the role KV_SCALES, [2, K] of a rank.

    num_kv_heads: of the undivided layer. Scales below LEAST_SCALE, those of heads without values, are raised to it.
    Raises ValueError, with the name, for values that no scale has.
    """
    layer = int(leaf.name.split(".")[1])
    scales_2K = torch.ones(leaf.shape)
    first = rank * num_kv_heads // num_ranks
    for row, kind in enumerate("kv"):
        if (name := names.get((layer, kind))) is None:
            continue
        values = tensors[name].float().flatten()
        if values.numel() not in (1, num_kv_heads):
            raise ValueError(f"{name} has {values.numel()} values; allowed: 1, or one for each of {num_kv_heads} heads")
        if not bool((values.isfinite() & (values > 0)).all()):
            raise ValueError(f"{name} is {values.tolist()}; allowed: finite numbers above 0")
        values = values.clamp(min=LEAST_SCALE)
        scales_2K[row] = values if values.numel() == 1 else values[first : first + leaf.shape[1]]
    return scales_2K
