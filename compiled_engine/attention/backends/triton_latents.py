"""Triton kernels for absorbed attention of all query heads to the same latent rows.

A cached row is the key of all heads, and its first part, the latent, is the value of all heads (attention/latents.py).
The rows of a query tile are queries times heads of a request, so a tile of keys is read once for many heads. The keys
of requests with one query are split among programs; a second kernel combines the results.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_engine.attention.backends.decode_splits import GRAIN, Splits, plan_splits
from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS
from compiled_engine.attention.backends.kernel_choice import has_large_tiles, num_multiprocessors
from compiled_engine.attention.backends.triton_combine import WIDEST_PART, Partials, combined, store_partials
from compiled_engine.attention.backends.triton_latent_rows import (
    LatentCache,
    latent_scale_ptrs,
    rotated_numbers,
    row_ptrs,
    words_of,
)
from compiled_engine.attention.backends.triton_tile import LOG2_E, LOWEST, blocks_of, normalised, sum_of, weigh
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.case import AttentionCase, require
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.triton_codes import ONE_SCALE, bfloat16_values, numbers
from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.kv_format import is_coded

# Largest latent, for whose sum a program has registers, and largest part of a row after it.
MAX_LATENT, MAX_ROTATED = 512, 128
MOST_ROTATED_OF_LARGE = 64  # elements of a rotated part with which large tiles fit the shared memory
MULTIPLE = 8
# See kernel_arguments.
NUMBERS = [*STEP_NUMBERS, "rotated_token_stride", "num_splits"]
TENSORS = [*STEP_TENSORS, "partial_max_ptr", "partial_sum_ptr", "places_ptr"]
# Memory of the partial results of a step: latents are so long that as many splits as for other decodes may take more.
MOST_PARTIAL_BYTES = 128 << 20
SMALLEST_TILE = 16  # of a matrix product


class LatentTiles(NamedTuple):
    """Rows (queries times heads) and keys of a tile, and the options with which the kernel is launched."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def latent_tiles(num_heads: int, element_size: int, *, coded: bool, large: bool = False) -> LatentTiles:
    """Return tiles that fit the shared memory and registers of every supported GPU, or of Hopper if `large`.

    element_size: of queries, in bytes. coded: the cache has 8-bit codes, which are converted in registers. large: some
    requests have several queries, and kernel_choice.has_large_tiles is true.
    """
    if large and element_size == 2 and not coded:
        return LatentTiles(64, 64, 8, 2)
    if element_size == 4:
        return LatentTiles(SMALLEST_TILE, 16, 8, 1) if coded else LatentTiles(SMALLEST_TILE, 16, 4, 2)
    rows = min(32, max(SMALLEST_TILE, next_power_of_2(num_heads)))
    return LatentTiles(rows, 32, 8 if coded else rows // 4, 2)


def latent_splits(
    num_requests: int, num_heads: int, rows: int, latent_dim: int, max_seq_len: int, device: torch.device
) -> Splits:
    """Return the splits of requests with one query. Their partial results take at most MOST_PARTIAL_BYTES.

    rows: of a tile. max_seq_len: see plan_splits.
    """
    splits = plan_splits(num_requests, cdiv(num_heads, rows), max_seq_len, num_multiprocessors(device))
    most = MOST_PARTIAL_BYTES // (num_requests * num_heads * latent_dim * torch.float32.itemsize)
    return replace(splits, count=max(1, min(splits.count, most)))


def require_sizes(case: AttentionCase) -> None:
    """Raise Refused unless the kernels have tiles for the sizes of a case of latent rows."""
    rotated = case.head_dim - case.latent_dim
    for name, size, most in (("latent_dim", case.latent_dim, MAX_LATENT), ("rotated elements", rotated, MAX_ROTATED)):
        require(0 < size <= most and size % MULTIPLE == 0, name, size, f"multiples of {MULTIPLE} up to {most}")


@triton.jit
def request_of(
    query_start_loc_ptr: tl.tensor,
    num_requests: tl.tensor,
    tile: tl.tensor,
    NUM_HEADS: tl.constexpr,
    TILE_M: tl.constexpr,
) -> tl.tensor:
    """Return the index of a tile's request.

    The tiles of request i begin with number query_start_loc[i] * NUM_HEADS // TILE_M + i. Tiles before those of request
    0 get request 0.
    """
    low = tile * 0
    above = low + num_requests
    while above - low > 1:
        middle = (low + above) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) * NUM_HEADS // TILE_M + middle
        low = tl.where(first_tile <= tile, middle, low)
        above = tl.where(first_tile <= tile, above, middle)
    return low


@quick_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def attend_latents_kernel(
    q_ptr: tl.tensor,
    rotated_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    words_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    places_ptr: tl.tensor | None,
    scale_log2: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    rotated_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    ROTATED_HEAD_STRIDE: tl.constexpr,
    ROTATED_MULTIPLE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
    GRAIN: tl.constexpr,
) -> None:
    """Compute attention to latent rows. Program (tile number, split) computes up to TILE_M rows of a request.

    A row of a tile is a query of the request and one of its heads. Programs whose tile number or split is unused return
    at once. The keys of a request with one query are split; a lone split writes the result to out, others store partial
    results. Rows of a request with seq_len 0 (padding) get zeros.

    q_ptr: [T, H, LATENT], queries of latents; out_ptr may be the same memory, since a program reads its rows before it
    writes them. rotated_ptr: [T, H, ROTATED], queries of rotated parts. cache_ptr, words_ptr: see LatentCache.
    partial_ptr, partial_max_ptr, partial_sum_ptr: see triton_combine.Partials, by request. query_start_loc_ptr,
    seq_lens_ptr, block_table_ptr: see AttentionInputs. places_ptr: see triton_expansion; requests with a place are left
    out; None: no request has one.
    ROTATED_MULTIPLE: a power of two that divides rotated_token_stride. TILE_R, TILE_P: LATENT and ROTATED, rounded up
    to powers of two.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    request = request_of(query_start_loc_ptr, num_requests, tile, NUM_HEADS, TILE_M)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    first_row = (tile - start * NUM_HEADS // TILE_M - request) * TILE_M
    unused = (first_row < 0) | (first_row >= query_len * NUM_HEADS)
    if places_ptr is not None:
        unused |= tl.load(places_ptr + request) >= 0
    last_query = tl.minimum((first_row + TILE_M - 1) // NUM_HEADS, query_len - 1)
    length = split_length(seq_len, num_splits, min_keys, GRAIN)
    is_split = (query_len == 1) & (length < seq_len)
    first_key = tl.where(is_split, split * length, 0)
    end_key = tl.minimum(seq_len - query_len + last_query + 1, seq_len)
    end_key = tl.where(is_split, tl.minimum(first_key + length, seq_len), end_key)
    if unused | ((split > 0) & ((query_len > 1) | (split * length >= seq_len))):
        return

    rows_M = first_row + tl.arange(0, TILE_M)
    mask_M = rows_M < query_len * NUM_HEADS
    queries_M = rows_M // NUM_HEADS
    heads_M = rows_M % NUM_HEADS
    positions_M = seq_len - query_len + queries_M
    r_R = tl.arange(0, TILE_R)
    p_P = tl.arange(0, TILE_P)
    of_latent_R = r_R < LATENT
    of_rotated_P = p_P < ROTATED
    tokens_M = (start + queries_M).to(tl.int64)
    q_rows_M = tl.multiple_of(tokens_M * q_token_stride, 8) + heads_M * Q_HEAD_STRIDE
    q_MR = tl.load(q_ptr + q_rows_M[:, None] + r_R[None, :], mask=mask_M[:, None] & of_latent_R[None, :], other=0.0)
    rotated_M = tl.multiple_of(tokens_M * rotated_token_stride, ROTATED_MULTIPLE) + heads_M * ROTATED_HEAD_STRIDE
    q_MP = tl.load(
        rotated_ptr + rotated_M[:, None] + p_P[None, :], mask=mask_M[:, None] & of_rotated_P[None, :], other=0.0
    )
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    n_N = tl.arange(0, TILE_N)
    acc_MR = tl.zeros([TILE_M, TILE_R], tl.float32)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    for key in range(first_key, end_key, TILE_N):
        keys_N = key + n_N
        stored_N = keys_N < end_key
        block_N = blocks_of(table_ptr, keys_N, end_key, BLOCK_SIZE)
        latent_ptr_N, rotated_ptr_N = row_ptrs(
            LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block_N, keys_N
        )
        # Slots without a key may hold anything, even NaN. Their weight is zero, but zero times NaN is NaN.
        latent_NR = tl.load(
            latent_ptr_N[:, None] + r_R[None, :], mask=stored_N[:, None] & of_latent_R[None, :], other=0.0
        )
        rotated_NP = tl.load(
            rotated_ptr_N[:, None] + p_P[None, :], mask=stored_N[:, None] & of_rotated_P[None, :], other=0.0
        )
        # In the type of queries: absorbed ones may be too large for float16.
        latent_NR = numbers(latent_NR, q_MR.dtype)
        scores_MN = tl.dot(q_MR, tl.trans(latent_NR), input_precision="ieee")
        scale_N = None
        if words_ptr is not None:
            scale_ptr_N = latent_scale_ptrs(
                LatentCache(cache_ptr, words_ptr, BLOCK_SIZE, LATENT, ROTATED), block_N, keys_N
            )
            scale_N = bfloat16_values(tl.load(scale_ptr_N, mask=stored_N, other=ONE_SCALE))
            scores_MN *= scale_N[None, :]
        rotated_NP = rotated_numbers(rotated_NP, q_MP.dtype)
        scores_MN = tl.dot(q_MP, tl.trans(rotated_NP), scores_MN, input_precision="ieee")
        if scale_N is not None:  # latents are values too: their scales are a part of the weights, see scores_of
            scores_MN += (tl.log2(scale_N) / scale_log2)[None, :]
        seen_MN = stored_N[None, :] & (keys_N[None, :] <= positions_M[:, None])
        weights_MN, rescale_M, max_M = weigh(tl.where(seen_MN, scores_MN, float("-inf")), max_M, scale_log2)
        sum_M = sum_M * rescale_M + sum_of(weights_MN, scale_N)
        weights_MN = weights_MN.to(latent_NR.dtype)
        acc_MR = tl.dot(weights_MN, latent_NR, acc_MR * rescale_M[:, None], input_precision="ieee")
    if is_split:
        partials_M = (request.to(tl.int64) * NUM_HEADS + heads_M) * num_splits + split
        partials = partial_ptr, partial_max_ptr, partial_sum_ptr
        store_partials(*partials, partials_M, mask_M, (acc_MR,), max_M, sum_M, LATENT, TILE_R)
    else:
        out_MR = normalised(acc_MR, max_M, sum_M, None, heads_M, mask_M, scale_log2)
        out_rows_M = tl.multiple_of(tokens_M * out_token_stride, 8) + heads_M * OUT_HEAD_STRIDE
        mask_MR = mask_M[:, None] & of_latent_R[None, :]
        tl.store(out_ptr + out_rows_M[:, None] + r_R[None, :], out_MR.to(out_ptr.dtype.element_ty), mask=mask_MR)


@quick_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def combine_latents_kernel(
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    scale_log2: tl.tensor,
    out_token_stride: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    OUT_HEAD_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_R: tl.constexpr,
    GRAIN: tl.constexpr,
) -> None:
    """Combine partial results. Program (head, request, part) writes a part of a head's result if keys were split.

    The arguments are those of attend_latents_kernel. TILE_S: num_splits rounded up to a power of two. TILE_R: elements
    of a part.
    """
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    num_keys = tl.load(seq_lens_ptr + request)
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    if (query_len != 1) | (length >= num_keys):
        return
    splits_S = tl.arange(0, TILE_S)
    written_S = (splits_S * length < num_keys) & (splits_S < num_splits)
    partials_S = (request * tl.num_programs(0) + head) * num_splits + splits_S
    partials = partial_ptr, partial_max_ptr, partial_sum_ptr
    r_R = tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)
    out_R = combined(*partials, partials_S, written_S, None, head, r_R, scale_log2, LATENT, "")
    out_row_ptr = out_ptr + tl.multiple_of(start.to(tl.int64) * out_token_stride, 8) + head * OUT_HEAD_STRIDE
    tl.store(out_row_ptr + r_R, out_R.to(out_ptr.dtype.element_ty), mask=r_R < LATENT)


class Requests(NamedTuple):
    """Consecutive requests of a batch: the parts of AttentionInputs that belong to them, and the host's facts.

    num_tokens: at least the tokens up to the end of the last request, counted from the beginning of the batch.
    """

    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RB: torch.Tensor
    num_tokens: int
    max_seq_len: int

    @classmethod
    def of(cls, inputs: AttentionInputs, num_tokens: int, max_seq_len: int) -> Requests:
        return cls(inputs.query_start_loc_R1, inputs.seq_lens_R, inputs.block_table_RB, num_tokens, max_seq_len)

    @property
    def num_requests(self) -> int:
        return self.seq_lens_R.shape[0]

    def first(self, count: int) -> Requests:
        """Return the first `count` requests, which are decodes."""
        tensors = self.query_start_loc_R1[: count + 1], self.seq_lens_R[:count], self.block_table_RB[:count]
        return Requests(*tensors, count, self.max_seq_len)

    def after(self, count: int) -> Requests:
        """Return the requests after the first `count`."""
        tensors = self.query_start_loc_R1[count:], self.seq_lens_R[count:], self.block_table_RB[count:]
        return Requests(*tensors, self.num_tokens, self.max_seq_len)


def attend_rows(
    q_THr: torch.Tensor,
    rotated_THp: torch.Tensor,
    cache_N1P1w: torch.Tensor,
    requests: Requests,
    scale: float,
    places_R: torch.Tensor | None = None,
) -> None:
    """Replace queries of latents, [T, H, r], by their weighted sums of latents: absorbed attention over the rows.

    rotated_THp: queries of the rotated parts. places_R: see triton_expansion; queries of requests with a place are left
    as they are. The last dimensions must be contiguous. The launches depend on shapes and the host's facts alone.
    """
    _, num_heads, latent_dim = q_THr.shape
    rotated_dim, num_requests = rotated_THp.shape[-1], requests.num_requests
    has_prompts = requests.num_tokens > num_requests
    large = has_prompts and rotated_dim <= MOST_ROTATED_OF_LARGE and has_large_tiles(q_THr.device)
    tiles = latent_tiles(num_heads, q_THr.element_size(), coded=is_coded(cache_N1P1w.dtype), large=large)
    splits = latent_splits(num_requests, num_heads, tiles.rows, latent_dim, requests.max_seq_len, q_THr.device)
    partials = Partials.of(q_THr, num_requests, splits.count)
    shared = {"LATENT": latent_dim, "OUT_HEAD_STRIDE": q_THr.stride(1), "GRAIN": GRAIN}
    tile_r = max(SMALLEST_TILE, next_power_of_2(latent_dim))
    scale_log2 = scale * LOG2_E.value
    attend_latents_kernel[(requests.num_tokens * num_heads // tiles.rows + num_requests, splits.count)](
        q_THr,
        rotated_THp,
        cache_N1P1w,
        words_of(cache_N1P1w),
        q_THr,
        *partials,
        requests.query_start_loc_R1,
        requests.seq_lens_R,
        requests.block_table_RB,
        places_R,
        scale_log2,
        num_requests,
        requests.block_table_RB.stride(0),
        q_THr.stride(0),
        rotated_THp.stride(0),
        q_THr.stride(0),
        splits.count,
        splits.min_keys,
        Q_HEAD_STRIDE=q_THr.stride(1),
        ROTATED_HEAD_STRIDE=rotated_THp.stride(1),
        ROTATED_MULTIPLE=gcd(MULTIPLE, rotated_THp.stride(0)),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=cache_N1P1w.shape[2],
        ROTATED=rotated_dim,
        TILE_M=tiles.rows,
        TILE_N=tiles.keys,
        TILE_R=tile_r,
        TILE_P=max(SMALLEST_TILE, next_power_of_2(rotated_dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **shared,
    )
    if splits.count > 1:
        part = min(tile_r, WIDEST_PART)
        combine_latents_kernel[(num_heads, num_requests, cdiv(latent_dim, part))](
            *partials,
            q_THr,
            requests.query_start_loc_R1,
            requests.seq_lens_R,
            scale_log2,
            q_THr.stride(0),
            splits.count,
            splits.min_keys,
            TILE_S=next_power_of_2(splits.count),
            TILE_R=part,
            num_warps=4,
            enable_fp_fusion=True,
            **shared,
        )
