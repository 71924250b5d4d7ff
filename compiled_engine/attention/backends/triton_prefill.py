"""Triton kernel: ragged causal attention over the paged cache, several queries per request.

The grid depends on the number of tokens and of requests alone; each program finds its request on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compiled_engine.attention.backends.triton_tile import LOWEST, attend_tile
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.kernels.launcher import quick_launches

SEARCH_WIDTH = tl.constexpr(256)
# Contexts up to this many tokens are short.
SHORT_CONTEXT = 1024


@dataclass(frozen=True)
class PrefillTiles:
    """Rows (queries times the heads that share a K/V head) and keys of a tile, and how it is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(head_dim: int, element_size: int, max_seq_len: int) -> PrefillTiles:
    """Tiles by head size (elements) and element size (bytes), so that registers and shared memory suffice.

    max_seq_len: the host's bound of the contexts; short ones leave large tiles half empty. `rows` is at least the
    largest group of query heads that the backend allows. On an H200, with 16 query heads on 8 K/V heads of size 128,
    prompts of 64 x 128, 16 x 512 and 2 x 4000 tokens take 51, 83 and 359 microseconds with the small tiles, 70, 95 and
    330 with the large ones.
    """
    if element_size == 4:
        return PrefillTiles(rows=32, keys=16, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=2)
    if max_seq_len <= SHORT_CONTEXT:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=3)
    return PrefillTiles(rows=128, keys=64, num_warps=4 if head_dim <= 64 else 8, num_stages=3)


@quick_launches
@triton.jit(
    do_not_specialize=["num_decodes", "num_requests", "table_stride", "q_token_stride", "out_token_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def prefill_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_decodes: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program: TILE_M // GROUP queries of one request, times the GROUP heads of one K/V head.

    Request i, counted after the decodes, starting at token t of them, owns the programs from
    t // queries + i on: enough for its queries, and computable without knowing the other requests.
    """
    QUERIES: tl.constexpr = TILE_M // GROUP
    kv_head = tl.program_id(0)
    # Later query tiles see more keys: start with them, so that short ones fill up the end.
    program = tl.num_programs(1) - 1 - tl.program_id(1)

    first_token = tl.load(query_start_loc_ptr + num_decodes)
    count = 0
    for start in range(num_decodes, num_requests, SEARCH_WIDTH):
        requests_S = start + tl.arange(0, SEARCH_WIDTH)
        listed_S = requests_S < num_requests
        tokens_S = tl.load(query_start_loc_ptr + requests_S, mask=listed_S, other=0) - first_token
        first_programs_S = tokens_S // QUERIES + requests_S - num_decodes
        count += tl.sum((listed_S & (first_programs_S <= program)).to(tl.int32), 0)
    request = num_decodes + count - 1

    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (program - (query_start - first_token) // QUERIES - (count - 1)) * QUERIES
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)

    rows_M = tl.arange(0, TILE_M)
    queries_M = first_query + rows_M // GROUP
    heads_M = kv_head * GROUP + rows_M % GROUP
    d_D = tl.arange(0, TILE_D)
    mask_MD = ((rows_M < QUERIES * GROUP) & (queries_M < query_len))[:, None] & (d_D[None, :] < HEAD_DIM)
    tokens_M = (query_start + queries_M).to(tl.int64)
    # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
    q_rows_M = tl.multiple_of(tokens_M * q_token_stride, 8) + heads_M * Q_HEAD_STRIDE
    q_MD = tl.load(q_ptr + q_rows_M[:, None] + d_D[None, :], mask=mask_MD, other=0.0)

    positions_M = seq_len - query_len + queries_M
    first_position = seq_len - query_len + first_query
    end_key = tl.minimum(first_position + QUERIES, seq_len)
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N
        end_unmasked = first_key
    else:
        first_key = 0
        end_unmasked = tl.maximum(first_position + 1, 0) // TILE_N * TILE_N
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    n_N = tl.arange(0, TILE_N)
    # First the tiles that every query sees whole, then the others.
    for masked in tl.static_range(2):
        start = end_unmasked if masked else first_key
        end = end_key if masked else end_unmasked
        # Blocks are looked up one tile ahead: only then are the loads of keys and values in flight side by side.
        block_N = tl.load(table_ptr + (start + n_N) // BLOCK_SIZE, mask=start + n_N < end_key, other=0)
        for key in range(start, end, TILE_N):
            next_N = key + TILE_N + n_N
            next_block_N = tl.load(table_ptr + next_N // BLOCK_SIZE, mask=next_N < end_key, other=0)
            acc_MD, max_M, sum_M = attend_tile(
                q_MD,
                acc_MD,
                max_M,
                sum_M,
                positions_M,
                key,
                end_key,
                block_N,
                head_cache_ptr,
                scale_log2,
                masked == 1,
                WINDOW,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                TILE_N,
                TILE_D,
            )
            block_N = next_block_N
    # A padding row (seq_len 0) saw no key: zeros.
    out_MD = acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    out_rows_M = tl.multiple_of(tokens_M * out_token_stride, 8) + heads_M * OUT_HEAD_STRIDE
    tl.store(out_ptr + out_rows_M[:, None] + d_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


def prefill(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int,
) -> None:
    """Launch the kernel for the requests after the first num_decodes; none has a context above max_seq_len."""
    num_tokens, num_heads, _ = q_THd.shape
    block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape[2:]
    num_requests = inputs.seq_lens_R.shape[0]
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(head_dim, kv_cache_N2PKd.element_size(), max_seq_len)
    num_programs = (num_tokens - num_decodes) // (tiles.rows // group) + num_requests - num_decodes
    prefill_kernel[(num_kv_heads, num_programs)](
        q_THd,
        kv_cache_N2PKd,
        out_THd,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scale * math.log2(math.e),
        num_decodes,
        num_requests,
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        Q_HEAD_STRIDE=q_THd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        WINDOW=sliding_window,
        GROUP=group,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_M=tiles.rows,
        TILE_N=tiles.keys,
        TILE_D=triton.next_power_of_2(head_dim),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
