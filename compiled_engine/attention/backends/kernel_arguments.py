"""Arguments that launches of several attention kernels share. Constants are cached, since they repeat in each step."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from compiled_engine.attention.backends.triton_tile import scales
from compiled_engine.attention.inputs import Rotation, Scoring
from compiled_engine.kernels.launch_arguments import next_power_of_2


def paged_constants(
    q_THd: torch.Tensor, kv_cache_N2PKd: torch.Tensor, out_THd: torch.Tensor, scoring: Scoring, *, tiled: bool = False
) -> dict[str, Any]:
    """Return the constexprs of kernels that read a paged cache: sizes of heads and blocks, head strides and scoring.

    tiled: include WIDTH and TILE_D for Triton kernels, whose tiles hold whole heads of a cache of any dtype.
    """
    head_strides = q_THd.stride(1), out_THd.stride(1)
    window, (_, cap_scale) = scoring.sliding_window, scales(scoring)
    return _paged_constants(q_THd.shape[1:], head_strides, kv_cache_N2PKd.shape[2:], window, cap_scale, tiled)


@cache
def _paged_constants(
    heads: tuple[int, int],
    head_strides: tuple[int, int],
    block: tuple[int, int, int],
    sliding_window: int,
    cap_scale: float,
    tiled: bool,
) -> dict[str, Any]:
    (num_heads, head_dim), (block_size, num_kv_heads, width) = heads, block
    constants = {
        "Q_HEAD_STRIDE": head_strides[0],
        "OUT_HEAD_STRIDE": head_strides[1],
        "WINDOW": sliding_window,
        "CAP_SCALE": cap_scale,
        "GROUP": num_heads // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
    }
    return constants | ({"WIDTH": width, "TILE_D": next_power_of_2(head_dim)} if tiled else {})


class NewKeys(NamedTuple):
    """This step's keys and values, which are to be written, and the rotation to apply to queries and keys before."""

    k_TKd: torch.Tensor
    v_TKd: torch.Tensor
    rotation: Rotation


class RotatingArguments(NamedTuple):
    """The arguments of a kernel that can norm and rotate q and k, and write k and v to the cache."""

    tensors: tuple[torch.Tensor | None, ...]  # q, k, v, weights of the norms of q and k, cos and sin
    token_strides: tuple[int, ...]  # of q, k, v, cos and sin
    constants: dict[str, Any]

    @classmethod
    def of(cls, q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, how: Rotation) -> RotatingArguments:
        tensors = q_THd, k_TKd, v_TKd, how.q_norm_weight_d, how.k_norm_weight_d, how.cos_T1d, how.sin_T1d
        token_strides = tuple([t.stride(0) for t in (q_THd, k_TKd, v_TKd, how.cos_T1d, how.sin_T1d)])
        constants = {
            "STRIDE_MULTIPLE": math.gcd(8, *token_strides),
            "K_HEAD_STRIDE": k_TKd.stride(1),
            "V_HEAD_STRIDE": v_TKd.stride(1),
            "OFFSET": how.norm_offset,
            "WIDE": how.norm_wide,
        }
        return cls(tensors, token_strides, constants)

    @classmethod
    def of_rotated(cls, q_THd: torch.Tensor) -> RotatingArguments:
        """Return the arguments for rotated queries and a cache that is already written.

        All other tensors are None, except that q stands in for cos and sin, which are not read.
        """
        stride = q_THd.stride(0)
        left_out = {"K_HEAD_STRIDE": 0, "V_HEAD_STRIDE": 0, "OFFSET": 0.0, "WIDE": False}
        tensors = q_THd, None, None, None, None, q_THd, q_THd
        return cls(tensors, (stride, 0, 0, 0, 0), {"STRIDE_MULTIPLE": math.gcd(8, stride), **left_out})


def rows_of(num_queries: int) -> int:
    """Return the rows of a tile for this many query heads: a power of two, at least the 16 of a tensor-core product."""
    return max(16, next_power_of_2(num_queries))
