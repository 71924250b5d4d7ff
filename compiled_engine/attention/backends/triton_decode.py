"""Triton kernel: decode attention over the paged cache, with each request's keys split between programs.

Another kernel combines the splits, as in Flash-Decoding (Dao et al. 2023). The query heads that share a K/V head are
computed together, so that each key is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, SMALL, Splits
from compiled_engine.attention.backends.kernel_arguments import paged_constants, rows_of
from compiled_engine.attention.backends.triton_combine import Partials, combine_splits, store_partials
from compiled_engine.attention.backends.triton_tile import (
    attend_keys,
    first_seen,
    normalised,
    scales,
)
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import scales_of
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches


@dataclass(frozen=True)
class DecodeTiles:
    """The number of keys of a tile, and the options with which the kernel is compiled."""

    keys: int
    num_warps: int
    num_stages: int
    look_ahead: bool = False  # look up blocks one tile ahead


@cache
def decode_tiles(head_dim: int, element_size: int, programs: int) -> DecodeTiles:
    """Return the tiles for a head size (elements) and element size (bytes). programs: intended per multiprocessor."""
    width = max(64, triton.next_power_of_2(head_dim))
    if element_size == 4:
        return DecodeTiles(keys=32 if head_dim <= 128 else 16, num_warps=8, num_stages=2)
    if programs == SMALL:
        return DecodeTiles(4096 // width, num_warps=1 if head_dim <= 128 else 4, num_stages=3)
    if programs == 2:
        return DecodeTiles(8192 // width, num_warps=4, num_stages=3, look_ahead=True)
    if head_dim <= 64:
        return DecodeTiles(keys=128, num_warps=4, num_stages=5)
    if head_dim <= 128:
        return DecodeTiles(keys=128, num_warps=4, num_stages=3)
    return DecodeTiles(keys=32, num_warps=4, num_stages=5)


@quick_launches
@triton.jit(
    do_not_specialize=["table_stride", "q_token_stride", "out_token_stride", "min_keys"],
    do_not_specialize_on_alignment=[
        "partial_max_ptr",
        "partial_sum_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "sinks_ptr",
    ],
)
def decode_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale_log2: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    min_keys: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Decode attention: program (K/V head, request, split) computes one query's GROUP heads over the keys of one split.

    A request's only split writes the result to out. Otherwise each split that has keys stores a partial result, which
    combine_kernel combines.

    q_ptr, out_ptr: [R, H, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr, partial_max_ptr, partial_sum_ptr: see Partials.
    seq_lens_ptr, block_table_ptr: see AttentionInputs. A padding row gets zeros.
    scale_log2, CAP_SCALE: see triton_tile.scales. min_keys, GRAIN: see split_length. LOOK_AHEAD: see fold_keys.
    WINDOW: keys that a query sees, 0: all. TILE_M, TILE_D: GROUP and HEAD_DIM, rounded up; TILE_N: keys of a tile.
    """
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    # Before the wait: kernels just before this one write q and the cache, but lengths were there before them.
    seq_len = tl.load(seq_lens_ptr + request)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    first_key = first_seen(seq_len, WINDOW)
    num_keys = seq_len - first_key
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    first_key += split * length
    end_key = tl.minimum(first_key + length, seq_len)
    if (split > 0) & (first_key >= end_key):
        return

    # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
    acc_MD, max_M, sum_M = attend_keys(
        q_ptr + tl.multiple_of(request * q_token_stride, 8),
        block_table_ptr + request * table_stride,
        cache_ptr,
        scales_ptr,
        kv_head,
        first_key,
        end_key,
        scale_log2,
        Q_HEAD_STRIDE,
        CAP_SCALE,
        GROUP,
        BLOCK_SIZE,
        NUM_KV_HEADS,
        HEAD_DIM,
        WIDTH,
        TILE_M,
        TILE_N,
        TILE_D,
        LOOK_AHEAD,
    )
    rows_M = tl.arange(0, TILE_M)
    heads_M = kv_head * GROUP + rows_M
    d_D = tl.arange(0, TILE_D)
    mask_MD = (rows_M[:, None] < GROUP) & (d_D[None, :] < HEAD_DIM)
    if length < num_keys:
        partials_M = (request * (NUM_KV_HEADS * GROUP) + heads_M) * num_splits + split
        partials = partial_ptr, partial_max_ptr, partial_sum_ptr
        store_partials(*partials, partials_M, rows_M < GROUP, acc_MD, max_M, sum_M, HEAD_DIM, TILE_D)
    else:
        out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, heads_M, rows_M < GROUP, scale_log2)
        out_rows_M = tl.multiple_of(request * out_token_stride, 8) + heads_M * OUT_HEAD_STRIDE
        tl.store(out_ptr + out_rows_M[:, None] + d_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


def decode(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    splits: Splits,
    scoring: Scoring,
) -> None:
    """Write the attention of the first num_decodes tokens, the queries of the first requests, from q_THd to out_THd.

    q_THd, out_THd: [T, H, d], d contiguous; the cache is contiguous and holds this step's keys. Launches a second
    kernel to combine several splits.
    """
    tiles = decode_tiles(q_THd.shape[2], q_THd.element_size(), splits.programs)
    constants = paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True)
    partials = Partials.of(out_THd, num_decodes, splits.count)
    decode_kernel[(kv_cache_N2PKd.shape[3], num_decodes, splits.count)](
        q_THd,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        *partials,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        scales(scoring)[0],
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        splits.min_keys,
        **constants,
        TILE_M=rows_of(constants["GROUP"]),
        TILE_N=tiles.keys,
        GRAIN=GRAIN,
        LOOK_AHEAD=tiles.look_ahead,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
    if splits.count > 1:
        combine_splits(partials, out_THd, inputs, splits, scoring)
