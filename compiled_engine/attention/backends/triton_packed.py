"""Triton kernel: bidirectional attention among the tokens of each request, without a KV cache.

A program computes one tile of a request's queries for one head. Request i begins at token start_i, and its tiles begin
at program index start_i // TILE_M + i; some indices are unused. A program finds its request by searching the starts, so
there is no list of tiles. The launch grid depends only on tensor shapes, so every batch can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS
from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    add_values,
    head_elements,
    head_masks,
    load_parts,
    load_queries,
    no_sums,
    normalised_parts,
    rescaled,
    scales,
    scores_of,
    store_parts,
    weigh,
)
from compiled_engine.attention.backends.wide_tiles import is_wide, most_rows, tile_of_head, wide_tiles
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches

# Starts of requests that are compared at a time.
SEARCHED = 512
# Batches up to this many tokens have small tiles, so that there are enough of them.
FEW_TOKENS = 1024


@dataclass(frozen=True)
class PackedTiles:
    """The numbers of queries and keys of a tile, and the options with which packed_kernel is compiled."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def packed_tiles(head_dim: int, element_size: int, num_tokens: int) -> PackedTiles:
    """Return tiles for a head size (elements) and element size (bytes) that fit registers and shared memory.

    num_tokens: tokens of the batch, which decide whether tiles are small. The number of requests says nothing about the
    length of texts, because a captured graph is padded to the largest number of requests.
    """
    if is_wide(head_dim):
        rows = most_rows(element_size)
        wide = wide_tiles(element_size, rows)
        return PackedTiles(rows, wide.keys, wide.num_warps, wide.num_stages)
    if element_size == 4:
        return PackedTiles(32, 16 if head_dim > 128 else 32, num_warps=8 if head_dim > 128 else 4, num_stages=2)
    if head_dim > 128:
        return PackedTiles(64, 32, num_warps=4, num_stages=2)
    if num_tokens <= FEW_TOKENS:
        return PackedTiles(64, 64, num_warps=4, num_stages=3 if head_dim <= 64 else 2)
    return PackedTiles(128, 64, num_warps=4 if head_dim <= 64 else 8, num_stages=3)


@quick_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def packed_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    bias_factor: tl.tensor,
    scale_log2: tl.tensor,
    num_requests: tl.tensor,
    q_token_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    SEARCHED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute bidirectional attention. Program (tile number, query head) computes up to TILE_M queries of a request.

    Programs whose tile number is unused return at once. Queries of a request with seq_len 0 (padding) get zeros.

    q_ptr, out_ptr: [T, H, d]; k_ptr, v_ptr: [T, K, d]; sinks_ptr: [H] or None.
    query_start_loc_ptr, seq_lens_ptr: see AttentionInputs.
    biases_ptr: [H, NUM_BIASES], see op.packed_attention, or None; bias_factor: 1 / scale, since products of queries and
        keys are scaled only when they are weighed.
    scale_log2, CAP_SCALE: see triton_tile.scales.
    WINDOW: keys that a query sees in either direction, itself included, 0: all. SEARCHED: starts of requests compared
        at a time.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = -1
    for begin in range(0, num_requests, SEARCHED):
        index_S = begin + tl.arange(0, SEARCHED)
        inside_S = index_S < num_requests
        start_S = tl.load(query_start_loc_ptr + index_S, mask=inside_S, other=0)
        request += tl.sum((inside_S & (start_S // TILE_M + index_S <= tile)).to(tl.int32), 0)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    first_query = (tile - start // TILE_M - request) * TILE_M
    if first_query >= length:
        return

    queries_M = first_query + tl.arange(0, TILE_M)
    elements = head_elements(HEAD_DIM, TILE_D)
    mask_M = queries_M < length
    masks = head_masks(mask_M, elements, HEAD_DIM)
    tokens_M = (start + queries_M).to(tl.int64)
    # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
    q_rows_M = tl.multiple_of(tokens_M * q_token_stride, 8) + head * Q_HEAD_STRIDE
    q_parts = load_queries(q_ptr + q_rows_M[:, None], elements, masks, "")

    num_keys = tl.where(tl.load(seq_lens_ptr + request) > 0, length, 0)
    first_key = 0
    end_key = num_keys
    end_unmasked = num_keys // TILE_N * TILE_N
    if WINDOW > 0:
        first_key = tl.maximum(first_query - WINDOW + 1, 0) // TILE_N * TILE_N
        end_key = tl.minimum(first_query + TILE_M - 1 + WINDOW, num_keys)
        end_unmasked = first_key
    kv_head = head // GROUP
    head_k_ptr = k_ptr + tl.multiple_of(start.to(tl.int64) * k_token_stride, 8) + kv_head * K_HEAD_STRIDE
    head_v_ptr = v_ptr + tl.multiple_of(start.to(tl.int64) * v_token_stride, 8) + kv_head * V_HEAD_STRIDE
    n_N = tl.arange(0, TILE_N)
    acc_parts = no_sums(TILE_M, elements)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    # First the tiles that every query sees whole, then the others.
    for masked in tl.static_range(2):
        for key in range(end_unmasked if masked else first_key, end_key if masked else end_unmasked, TILE_N):
            keys_N = key + n_N
            stored_N = keys_N < end_key
            k_rows_N = tl.multiple_of(keys_N.to(tl.int64) * k_token_stride, 8)
            k_parts = load_parts(head_k_ptr + k_rows_N, stored_N, masked == 1, HEAD_DIM, TILE_D)
            scores_MN = scores_of(q_parts, k_parts, None, None, scale_log2, CAP_SCALE)
            if biases_ptr is not None:
                FARTHEST: tl.constexpr = NUM_BIASES // 2
                apart_MN = keys_N[None, :] - queries_M[:, None]
                column_MN = tl.minimum(tl.maximum(apart_MN, -FARTHEST), FARTHEST) + FARTHEST
                scores_MN += tl.load(biases_ptr + head * NUM_BIASES + column_MN).to(tl.float32) * bias_factor
            if masked == 1:
                seen_MN = stored_N[None, :]
                if WINDOW > 0:
                    distance_MN = queries_M[:, None] - keys_N[None, :]
                    seen_MN = seen_MN & (distance_MN < WINDOW) & (distance_MN > -WINDOW)
                scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
            weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
            acc_parts = rescaled(acc_parts, rescale_M)
            sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
            v_rows_N = tl.multiple_of(keys_N.to(tl.int64) * v_token_stride, 8)
            v_parts = load_parts(head_v_ptr + v_rows_N, stored_N, masked == 1, HEAD_DIM, TILE_D)
            acc_parts = add_values(acc_parts, weights_MN, v_parts, q_parts[0].dtype)
    heads_M = tl.zeros([TILE_M], tl.int32) + head
    is_padding = num_keys == 0
    out_parts = normalised_parts(acc_parts, max_M, sum_M, sinks_ptr, heads_M, mask_M, scale_log2)
    out_parts = [tl.where(is_padding, 0.0, out_MD) for out_MD in out_parts]
    out_rows_M = tl.multiple_of(tokens_M * out_token_stride, 8) + head * OUT_HEAD_STRIDE
    store_parts(out_ptr, out_rows_M[:, None], out_parts, elements, masks)


def attend_packed(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    scoring: Scoring,
    biases_HW: torch.Tensor | None,
) -> None:
    """Write to out_THd the bidirectional attention among the tokens of each request, see `op.packed_attention`.

    q_THd, out_THd: [T, H, d]; k_TKd, v_TKd: [T, K, d]; d contiguous. biases_HW: contiguous, or None.
    """
    num_tokens, num_heads, head_dim = q_THd.shape
    num_requests, num_kv_heads = inputs.seq_lens_R.shape[0], k_TKd.shape[1]
    tiles = packed_tiles(head_dim, q_THd.element_size(), num_tokens)
    scale_log2, cap_scale = scales(scoring)
    packed_kernel[(num_tokens // tiles.queries + num_requests, num_heads)](
        q_THd,
        k_TKd,
        v_TKd,
        out_THd,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        scoring.sinks_H,
        biases_HW,
        1 / scoring.scale,
        scale_log2,
        num_requests,
        q_THd.stride(0),
        k_TKd.stride(0),
        v_TKd.stride(0),
        out_THd.stride(0),
        Q_HEAD_STRIDE=q_THd.stride(1),
        K_HEAD_STRIDE=k_TKd.stride(1),
        V_HEAD_STRIDE=v_TKd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        WINDOW=scoring.sliding_window,
        NUM_BIASES=0 if biases_HW is None else biases_HW.shape[1],
        CAP_SCALE=cap_scale,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_M=tiles.queries,
        TILE_N=tiles.keys,
        TILE_D=tile_of_head(head_dim),
        SEARCHED=SEARCHED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
