"""Arguments that launches of several attention kernels share. Constants are cached, since they repeat in each step."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from compiled_engine.attention.backends.triton_tile import scales
from compiled_engine.attention.backends.wide_tiles import tile_of_head
from compiled_engine.attention.inputs import Rotation, Scoring
from compiled_engine.kernels.launch_arguments import next_power_of_2

# Numbers for which attention kernels are not compiled anew: strides of tokens, and counts that differ between batches.
STEP_NUMBERS = [
    *("q_token_stride", "k_token_stride", "v_token_stride", "out_token_stride"),
    *("q_stride", "k_stride", "v_stride", "cos_stride", "sin_stride", "out_stride", "table_stride"),
    *("num_requests", "min_keys"),
]
# Tensors that may begin anywhere, since they are parts of buffers.
STEP_TENSORS = [
    *("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "slot_mapping_ptr"),
    *("work_ptr", "num_tiles_ptr", "sinks_ptr"),
]


def paged_constants(
    q_THd: torch.Tensor, kv_cache_N2PKd: torch.Tensor, out_THd: torch.Tensor, scoring: Scoring, *, tiled: bool = False
) -> dict[str, Any]:
    """Return the constexprs of kernels that read a paged cache: sizes of heads and blocks, head strides and scoring.

    tiled: include WIDTH and TILE_D for Triton kernels, which read a cache of any dtype; see tile_of_head.
    """
    _, num_heads, head_dim = q_THd.shape
    _, _, block_size, num_kv_heads, width = kv_cache_N2PKd.shape
    _, q_head_stride, _ = q_THd.stride()
    _, out_head_stride, _ = out_THd.stride()
    window, (_, cap_scale) = scoring.sliding_window, scales(scoring)
    heads = num_heads, num_kv_heads, head_dim, q_head_stride, out_head_stride
    return _paged_constants(*heads, block_size, width, window, cap_scale, tiled)


@cache
def _paged_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_head_stride: int,
    out_head_stride: int,
    block_size: int,
    width: int,
    sliding_window: int,
    cap_scale: float,
    tiled: bool,
) -> dict[str, Any]:
    constants = {
        "Q_HEAD_STRIDE": q_head_stride,
        "OUT_HEAD_STRIDE": out_head_stride,
        "WINDOW": sliding_window,
        "CAP_SCALE": cap_scale,
        "GROUP": num_heads // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
    }
    return constants | ({"WIDTH": width, "TILE_D": tile_of_head(head_dim)} if tiled else {})


class NewKeys(NamedTuple):
    """This step's keys and values to be written, and the rotation to apply to queries and keys before that."""

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
        q_stride, _, _ = q_THd.stride()
        k_stride, k_head_stride, _ = k_TKd.stride()
        v_stride, v_head_stride, _ = v_TKd.stride()
        token_strides = q_stride, k_stride, v_stride, how.cos_T1d.stride()[0], how.sin_T1d.stride()[0]
        new_heads = k_head_stride, v_head_stride, how.norm_offset, how.norm_wide
        return cls(tensors, token_strides, _rotating_constants(token_strides, *new_heads))

    @classmethod
    def of_rotated(cls, q_THd: torch.Tensor) -> RotatingArguments:
        """Return the arguments for rotated queries and a cache that is already written.

        All other tensors are None, except that q stands in for cos and sin, which are not read.
        """
        stride = q_THd.stride(0)
        tensors = q_THd, None, None, None, None, q_THd, q_THd
        return cls(tensors, (stride, 0, 0, 0, 0), _rotating_constants((stride,), 0, 0, 0.0, False))


@cache
def _rotating_constants(
    token_strides: tuple[int, ...], k_head_stride: int, v_head_stride: int, norm_offset: float, norm_wide: bool
) -> dict[str, Any]:
    return {
        "STRIDE_MULTIPLE": math.gcd(8, *token_strides),
        "K_HEAD_STRIDE": k_head_stride,
        "V_HEAD_STRIDE": v_head_stride,
        "OFFSET": norm_offset,
        "WIDE": norm_wide,
    }


def rows_of(num_queries: int) -> int:
    """Return the number of rows of a tile for num_queries query heads: a power of two, at least 16 for tensor cores."""
    return max(16, next_power_of_2(num_queries))
