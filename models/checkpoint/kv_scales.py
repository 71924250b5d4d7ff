"""Read the scales of an FP8 KV cache from a checkpoint: for keys and for values, one per layer or one per K/V head.

Names of the tensors: `self_attn.k_scale` (compressed-tensors), `self_attn.k_proj.k_scale` (modelopt), and
`self_attn.k_proj.output_scale` (older files); for values, `v` instead of `k`. A key is its 8-bit value times the scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from compiled_engine.kv_format import LEAST_SCALE
from compiled_engine.passes.framework.parameter import Parameter

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$")


def find_kv_scales(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[int, str], str]:
    """Return the names of the tensors that hold scales of the KV cache, by (layer, "k" or "v")."""
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
    """Return a rank's values of `leaf`, a parameter with the role KV_SCALES: [2, K], for keys and values of K heads.

    tensors: the checkpoint's. names: from `find_kv_scales`. num_kv_heads: K/V heads of the whole layer, on all ranks.
    Scales that the checkpoint lacks are 1. Scales below LEAST_SCALE, as for heads whose values are all 0, are raised to
    LEAST_SCALE. Raises ValueError, with the tensor's name, if a tensor has a wrong number of scales, or a scale that is
    not finite and positive.
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
