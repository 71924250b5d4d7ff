"""Triton kernel: decode attention over the paged cache, with each request's keys split between programs.

A request has one query, or also those of its drafts: each token is a row of the batch, a request's rows are
consecutive, and each query sees the keys up to its own position. The queries of all heads that share a K/V head are
rows of one tile, so that each key is read once for all of them, unless many drafts need several tiles.

Another kernel combines the splits, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, SMALL, Splits
from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS, paged_constants, rows_of
from compiled_engine.attention.backends.triton_combine import Partials, combine_splits, store_partials
from compiled_engine.attention.backends.triton_tile import (
    HeadCache,
    attend_keys,
    first_seen,
    head_elements,
    head_masks,
    keys_of_rows,
    normalised_parts,
    scales,
    store_parts,
)
from compiled_engine.attention.backends.wide_tiles import is_wide, most_rows, wide_tiles
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import scales_of
from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

# Most bytes of a column of a tile of queries; if it would have more, programs share a request's queries.
MOST_ROW_BYTES = 128


def queries_of_tile(query_len: int, group: int, head_dim: int, element_size: int) -> int:
    """Return how many queries of a request share a tile, which has a row for each query and each of `group` heads."""
    rows = most_rows(element_size) if is_wide(head_dim) else MOST_ROW_BYTES // element_size
    return min(query_len, max(1, rows // group))


@dataclass(frozen=True)
class DecodeTiles:
    """The number of keys of a tile, and the options with which decode_kernel is compiled."""

    keys: int
    num_warps: int
    num_stages: int
    look_ahead: bool = False  # look up blocks one tile ahead


@cache
def decode_tiles(head_dim: int, element_size: int, programs: int) -> DecodeTiles:
    """Return tiles for a head size (elements, up to 256) and an element size (bytes).

    programs: intended number of programs per multiprocessor.
    """
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


@cache
def draft_tiles(head_dim: int, element_size: int, programs: int, rows: int) -> DecodeTiles:
    """Return tiles like decode_tiles, but with more warps or fewer keys if a tile of queries has more than 16 rows."""
    tiles = decode_tiles(head_dim, element_size, programs)
    if rows <= 16:
        return tiles
    if element_size == 4 or head_dim > 128:
        return DecodeTiles(16, num_warps=8, num_stages=2)
    if programs == SMALL:
        return DecodeTiles(tiles.keys, num_warps=4, num_stages=3)
    return DecodeTiles(64, num_warps=4, num_stages=3, look_ahead=tiles.look_ahead)


@cache
def query_options(query_len: int, group: int, head_dim: int, element_size: int, programs: int) -> dict[str, Any]:
    """Return the constants and options of decode_kernel that depend on the tiles.

    The arguments are those of queries_of_tile and decode_tiles. See also wide_tiles.
    """
    queries = queries_of_tile(query_len, group, head_dim, element_size)
    rows = rows_of(queries * group)
    sizes = head_dim, element_size, programs
    if is_wide(head_dim):
        wide = wide_tiles(element_size, rows)
        tiles = DecodeTiles(wide.keys, wide.num_warps, wide.num_stages)
    else:
        tiles = decode_tiles(*sizes) if query_len == 1 else draft_tiles(*sizes, rows)
    return {
        "QUERY_LEN": query_len,
        "TILE_QUERIES": queries,
        "TILE_Q": next_power_of_2(query_len),
        "TILE_M": rows,
        "TILE_N": tiles.keys,
        "LOOK_AHEAD": tiles.look_ahead,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@quick_launches
@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=[*STEP_TENSORS, "partial_max_ptr", "partial_sum_ptr"],
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
    QUERY_LEN: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute decode attention. Program (K/V head, request and part of its rows, split) reads the keys of one split.

    A program computes TILE_QUERIES of a request's QUERY_LEN rows, for GROUP heads. Rows are consecutive, padding last.
    A request's only split writes the results to out. Otherwise each split that has keys stores partial results, which
    combine_kernel combines.

    q_ptr, out_ptr: [R, H, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr, partial_max_ptr, partial_sum_ptr: see triton_combine.Partials.
    seq_lens_ptr, block_table_ptr: see AttentionInputs. A padding row gets zeros.
    scale_log2, CAP_SCALE: see triton_tile.scales. min_keys, GRAIN: see work_list.split_length. LOOK_AHEAD: see
        triton_tile.fold_keys.
    WINDOW: keys that a query sees, 0: all. TILE_Q: QUERY_LEN, TILE_M: TILE_QUERIES * GROUP, TILE_D: HEAD_DIM, each
        rounded up; TILE_N: keys of a tile.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    m_M = tl.arange(0, TILE_M)
    # Before the wait: kernels just before this one write q and the cache, but lengths were there before them.
    if QUERY_LEN == 1:
        first_row = tl.program_id(1).to(tl.int64)
        last_row = first_row
        end_key = tl.load(seq_lens_ptr + first_row)
        first_key = first_seen(end_key, WINDOW)
        query_M = 0
        head_M = kv_head * GROUP + m_M
        mask_M = m_M < GROUP
        positions_M = None
    else:
        TILES: tl.constexpr = (QUERY_LEN + TILE_QUERIES - 1) // TILE_QUERIES
        first_row = tl.program_id(1).to(tl.int64) // TILES * QUERY_LEN
        first_key, end_key, last_row = keys_of_rows(seq_lens_ptr, first_row, QUERY_LEN, WINDOW, TILE_Q)
        query_M = tl.program_id(1) % TILES * TILE_QUERIES + m_M // GROUP
        head_M = kv_head * GROUP + m_M % GROUP
        mask_M = (m_M < TILE_QUERIES * GROUP) & (query_M < QUERY_LEN)
        seq_lens_M = tl.load(seq_lens_ptr + first_row + tl.where(mask_M, query_M, 0), mask=mask_M, other=0)
        positions_M = seq_lens_M - 1
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    num_keys = end_key - first_key
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    first_key += split * length
    end_key = tl.minimum(first_key + length, end_key)
    if (split > 0) & (first_key >= end_key):
        return

    # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
    q_ptr += tl.multiple_of(first_row * q_token_stride, 8)
    head_scales_ptr = None
    if scales_ptr is not None:
        head_scales_ptr = scales_ptr + kv_head
    acc_parts, max_M, sum_M = attend_keys(
        q_ptr + (query_M * q_token_stride + head_M * Q_HEAD_STRIDE),
        mask_M,
        positions_M,
        # A row's table has no blocks beyond the row's own context, so the last row's is read.
        block_table_ptr + last_row * table_stride,
        HeadCache(cache_ptr + kv_head * HEAD_DIM, head_scales_ptr, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH),
        first_key,
        end_key,
        scale_log2,
        WINDOW,
        CAP_SCALE,
        TILE_M,
        TILE_N,
        TILE_D,
        LOOK_AHEAD,
    )
    elements = head_elements(HEAD_DIM, TILE_D)
    masks = head_masks(mask_M, elements, HEAD_DIM)
    if length < num_keys:
        partials_M = ((first_row + query_M) * (NUM_KV_HEADS * GROUP) + head_M) * num_splits + split
        partials = partial_ptr, partial_max_ptr, partial_sum_ptr
        store_partials(*partials, partials_M, mask_M, acc_parts, max_M, sum_M, HEAD_DIM, TILE_D)
    else:
        out_parts = normalised_parts(acc_parts, max_M, sum_M, sinks_ptr, head_M, mask_M, scale_log2)
        out_rows_M = tl.multiple_of(first_row * out_token_stride, 8) + query_M * out_token_stride
        out_rows_M += head_M * OUT_HEAD_STRIDE
        store_parts(out_ptr, out_rows_M[:, None], out_parts, elements, masks)


def decode(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    query_len: int,
    splits: Splits,
    scoring: Scoring,
) -> None:
    """Write the attention of all rows to out_THd. Each row is one token; `query_len` consecutive rows share a request.

    Each row of a request sees one key more than the row before; the last rows may be padding. q_THd, out_THd: [R, H,
    d], d contiguous; the cache is contiguous and holds the keys of all rows. If there are several splits, a second
    kernel combines them.
    """
    num_rows = inputs.seq_lens_R.shape[0]
    constants = paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True)
    group, head_dim = constants["GROUP"], constants["HEAD_DIM"]
    options = query_options(query_len, group, head_dim, q_THd.element_size(), splits.programs)
    partials = Partials.of(out_THd, num_rows, splits.count)
    num_programs = num_rows // query_len * cdiv(query_len, options["TILE_QUERIES"])
    decode_kernel[(kv_cache_N2PKd.shape[3], num_programs, splits.count)](
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
        **options,
        GRAIN=GRAIN,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
    if splits.count > 1:
        combine_splits(partials, out_THd, inputs, splits, scoring, query_len)
